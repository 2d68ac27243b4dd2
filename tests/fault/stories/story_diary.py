"""Reads the diaries of a job's workers, also of the dead ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One committed step, as one worker saw it."""

    at_s: float
    number: int
    world_size: int
    epoch: int
    digest: str
    samples: tuple[int, ...]


@dataclass
class Worker:
    """One process's diary."""

    pid: int
    rank: int = -1
    number: int = -1
    born_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    end: str = ""  # digest of the parameters, once it has finished


class Diaries:
    """All diaries in a directory; each line is read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workers: dict[Path, Worker] = {}
        self._read_bytes: dict[Path, int] = {}

    def read(self) -> list[Worker]:
        """Take in what was written meanwhile; return the workers in the order of their ranks."""
        for path in self._directory.glob("*.diary"):
            worker = self._workers.setdefault(path, Worker(int(path.stem)))
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                for line in whole.decode().splitlines():
                    _take_in(worker, line)
        return sorted(self._workers.values(), key=lambda worker: worker.rank)


def _take_in(worker: Worker, line: str) -> None:
    at, kind, *words = line.split()
    if kind == "born":
        worker.rank, worker.number, worker.born_s = int(words[0]), int(words[1]), float(at)
    elif kind == "step":
        number, size, epoch = map(int, words[:3])
        samples = tuple(map(int, words[4].split(",")))
        worker.steps.append(Step(float(at), number, size, epoch, words[3], samples))
    elif kind == "end":
        worker.end = words[1]


def require_agreement(workers: Sequence[Worker]) -> None:
    """Require that all workers that did a step had the same parameters after it, each step once."""
    by_step: dict[int, set[str]] = {}
    for worker in workers:
        numbers = [step.number for step in worker.steps]
        assert numbers == sorted(set(numbers)), f"rank {worker.rank} did a step twice: {numbers}"
        for step in worker.steps:
            by_step.setdefault(step.number, set()).add(step.digest)
    split = {number: states for number, states in by_step.items() if len(states) > 1}
    assert not split, f"workers disagree after steps {split}"
    assert sorted(by_step) == list(range(1, len(by_step) + 1)), "a step is missing"


def samples_of(workers: Sequence[Worker], epoch: int) -> Counter[int]:
    """Count how often each sample was part of a committed step of that epoch."""
    return Counter(
        sample
        for worker in workers
        for step in worker.steps
        if step.epoch == epoch
        for sample in step.samples
    )
