"""Writing in the background: one thread for each worker, which writes what was copied.

The copy takes the time of one memcpy, so that training can go on at once. Its memory is used again
for the next one: fresh pages from the kernel would cost more than the copying itself.

Every worker writes its part; the first one waits for all parts and publishes. If one fails (a full
disk), the save is given up and the one before stays what counts: training goes on, and is told.

Threads: `start` and `wait` are the main thread's; one save is under way at a time. The thread has
no lower priority: it would hold the interpreter's lock while others run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError, PacelineError
from paceline.state.checkpoint.contents import Said
from paceline.state.files import manifest, staging, writing

_ALIGNMENT = 64


class SnapshotMemory:
    """One piece of memory for one copy at a time. Whoever takes a copy is done with the last."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies, contiguous and on the CPU."""
        sizes = {name: _room(tensor) for name, tensor in tensors.items()}
        total = sum(sizes.values())
        if self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8)
        copies, at = dict[str, torch.Tensor](), 0
        for name, tensor in tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            place = self._memory[at : at + num_bytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor.detach())
            at += sizes[name]
        return copies


def _room(tensor: torch.Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_PARTS_S = 120.0  # how long the first worker waits for the parts of the others


@dataclass(frozen=True)
class Plan:
    """Which save this is, and whose."""

    root: Path
    step: int
    nonce: str
    number: int  # of this worker's part
    places: Sequence[int]  # of those who write a part, among all workers; some may have left
    others: Mapping[int, Any]  # by place: what those have said who have left
    num_workers: int
    keep: int


@dataclass(frozen=True)
class Outcome:
    """What became of a save."""

    step: int
    took_s: float
    stalled_s: float
    num_bytes: int = 0
    path: Path | None = None  # where it was published, by this worker
    error: PacelineError | None = None


class Writer:
    """Writes this worker's part of each save."""

    def __init__(self, on_end: Callable[[Outcome], None]) -> None:
        self._on_end = on_end  # called on the thread
        self._memory = SnapshotMemory()
        self._thread: threading.Thread | None = None
        self._last: Outcome | None = None
        self._given_up: list[Path] = []  # by the first worker; late ones may have come back to them

    def start(self, plan: Plan, said: Said, started_s: float) -> float:
        """Copy everything, and write it while training goes on; return how long that stalled it.

        Blocks while the save before is being written.
        """
        self.wait()
        tensors = self._memory.copy(said.tensors)
        stalled_s = time.perf_counter() - started_s
        work = lambda: self._run(plan, Said(tensors, said.own, said.common), stalled_s)  # noqa: E731
        self._thread = threading.Thread(target=work, name="paceline checkpoint", daemon=True)
        self._thread.start()
        return stalled_s

    def wait(self) -> Outcome | None:
        """Wait until the last save has been written; return what became of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._last

    def close(self) -> None:
        """Let the last save come to its end; what became of it has been told."""
        self.wait()

    def _run(self, plan: Plan, said: Said, stalled_s: float) -> None:
        started_s = time.perf_counter()
        outcome = Outcome(plan.step, 0.0, stalled_s)
        try:
            path, num_bytes = self._write(plan, said)
            took_s = time.perf_counter() - started_s
            outcome = Outcome(plan.step, took_s, stalled_s, num_bytes, path)
        except PacelineError as error:
            outcome = Outcome(plan.step, time.perf_counter() - started_s, stalled_s, error=error)
        except Exception as error:  # a bug must not vanish with the thread
            wrapped = CheckpointError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            outcome = Outcome(plan.step, time.perf_counter() - started_s, stalled_s, error=wrapped)
        self._last = outcome
        self._on_end(outcome)

    def _write(self, plan: Plan, said: Said) -> tuple[Path | None, int]:
        directory = staging.begin(plan.root, plan.step, plan.nonce)
        is_first = plan.number == 0
        try:
            record = writing.write_part(directory, plan.number, said.tensors)
            if not is_first:
                writing.leave_record(directory, plan.number, record, said.own)
                return None, record.bytes
            return self._publish(plan, directory, record, said)
        except PacelineError as error:
            self._give_up(directory, plan.number, error, is_first=is_first)
            raise

    def _publish(
        self, plan: Plan, directory: Path, record: manifest.PartRecord, said: Said
    ) -> tuple[Path, int]:
        others = range(1, len(plan.places))
        left = writing.collect_records(directory, others, wait_s=_PARTS_S)
        records = [record, *(one.record for one in left.values() if one.record is not None)]
        workers = [plan.others.get(place) for place in range(plan.num_workers)]
        owns = [said.own, *(one.plain for one in left.values())]
        for place, own in zip(plan.places, owns, strict=True):
            workers[place] = own
        models = said.common["models"]
        content: dict[str, Any] = {
            "pace": models[0]["pace"] if models else "",
            "common": said.common,
            "workers": workers,
        }
        described = manifest.make(
            step=plan.step, world=plan.num_workers, content=content, parts=records
        )
        path = writing.publish(directory, described)
        writing.retain(plan.root, plan.keep, saved=path)
        while self._given_up:  # by now all are through with those
            staging.abandon(self._given_up.pop())
        return path, described.num_bytes

    def _give_up(
        self, directory: Path, number: int, error: PacelineError, *, is_first: bool
    ) -> None:
        """Leave nothing behind; the first worker hears of a part that will not come."""
        try:
            if is_first:
                self._given_up.append(directory)
                staging.abandon(directory)
            elif staging.outer_of(directory).is_dir():
                writing.leave_failure(directory, number, str(error))
        except CheckpointError:
            return  # the disk does not take even that; the first worker stops waiting by itself
