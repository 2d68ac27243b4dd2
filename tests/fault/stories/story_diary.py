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


def read(directory: Path) -> list[Worker]:
    """Read all diaries, in the order of the ranks."""
    workers = []
    for path in directory.glob("*.diary"):
        worker = Worker(int(path.stem))
        for line in path.read_text().splitlines():
            at, kind, *words = line.split()
            if kind == "born":
                worker.rank, worker.number, worker.born_s = int(words[0]), int(words[1]), float(at)
            elif kind == "step":
                number, size, epoch = map(int, words[:3])
                samples = tuple(map(int, words[4].split(",")))
                worker.steps.append(Step(float(at), number, size, epoch, words[3], samples))
            elif kind == "end":
                worker.end = words[1]
        workers.append(worker)
    return sorted(workers, key=lambda worker: worker.rank)


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
