"""Writing in the background: one thread per worker writes the copied state.

The copy takes as long as one memcpy, then training continues. Its memory is reused for the next
save: fresh pages from the kernel would cost more than the copy itself.

Every worker writes its part; the first worker waits for all parts and publishes. If a part fails (a
full disk), the save is abandoned and the previous checkpoint remains valid: training continues, and
a warning is logged.

Threads: the main thread calls `start` and `wait`; one save runs at a time. The writer thread
keeps its normal priority: with a lower one it could lose its core while it holds the GIL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.comm.device_route import Copied, DeviceRoute
from paceline.comm.devices import is_on_device, pinned_like
from paceline.errors import CheckpointError, PacelineError
from paceline.runtime.console import say
from paceline.state.checkpoint.contents import WorkerState
from paceline.state.files import manifest, staging
from paceline.state.files import save as writing

_ALIGNMENT = 64


class SnapshotMemory:
    """Memory for one copy at a time. A new copy overwrites the last one.

    Tensors on a device are copied to pinned memory, by the device: it goes on with what it has to
    do, and changes none of them before they are copied. The host goes on at once. So `wait` comes
    before the copies are read.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._route: DeviceRoute | None = None
        self._copied: Copied | None = None

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies, contiguous and on the CPU; after `wait` they are complete."""
        there = {name: tensor for name, tensor in tensors.items() if is_on_device(tensor)}
        here = {name: tensor for name, tensor in tensors.items() if name not in there}
        self._memory, copies = _lay_out(here, self._memory, _allocate)
        for name, copy in copies.items():
            copy.copy_(here[name].detach())
        return {**copies, **self._copy_from_device(there)} if there else copies

    def _copy_from_device(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        device = next(iter(tensors.values())).device
        if self._route is None:
            self._route = DeviceRoute(device)
        self._pinned, copies = _lay_out(tensors, self._pinned, partial(_allocate_pinned, device))
        pairs = ((tensors[name].detach(), copy) for name, copy in copies.items())
        self._copied = self._route.to_host_together(pairs)
        self._copied.wait_on_stream()  # what the script's stream does next may change them
        return copies

    def wait(self) -> None:
        """Block until the copies are complete; on the thread of the writer."""
        if self._copied is not None:
            self._copied.wait_on_host()
            self._copied = None


def _lay_out(
    tensors: Mapping[str, torch.Tensor],
    memory: torch.Tensor,
    allocate: Callable[[int], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return memory that has room for all tensors, and a contiguous part of it for each."""
    sizes = {name: _room(tensor) for name, tensor in tensors.items()}
    total = sum(sizes.values())
    if memory.numel() < total:
        memory = allocate(total)
    parts, at = dict[str, torch.Tensor](), 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        parts[name] = memory[at : at + num_bytes].view(tensor.dtype).view(tensor.shape)
        at += sizes[name]
    return memory, parts


def _allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _allocate_pinned(device: torch.device, size: int) -> torch.Tensor:
    """Return pinned memory; ordinary memory where that is impossible: then the copy blocks."""
    memory = _allocate(size)
    pinned = pinned_like(memory, device)
    if pinned is None:
        say(
            f"{device}: host memory cannot be pinned (see ulimit -l), so training pauses while a"
            " checkpoint is copied from the device"
        )
    return memory if pinned is None else pinned


def _room(tensor: torch.Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_PARTS_S = 120.0  # how long the first worker waits for the parts of the other workers


@dataclass(frozen=True)
class SavePlan:
    """Parameters of one save."""

    root: Path
    step: int
    nonce: str
    number: int  # of this worker's part
    positions: Sequence[int]  # of the writing workers among all workers; some may have left
    departed: Mapping[int, Any]  # by position: counters of workers that have exited
    num_workers: int
    keep: int


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save."""

    step: int
    took_s: float
    stalled_s: float
    num_bytes: int = 0
    path: Path | None = None  # where it was published, by this worker
    error: PacelineError | None = None


class Writer:
    """Writes this worker's part of each save."""

    def __init__(self, on_end: Callable[[SaveOutcome], None]) -> None:
        self._on_end = on_end  # called on the thread
        self._memory = SnapshotMemory()
        self._thread: threading.Thread | None = None
        self._last: SaveOutcome | None = None
        self._abandoned: list[
            Path
        ] = []  # by the first worker; late workers may still write to them

    def start(self, plan: SavePlan, state: WorkerState, started_s: float) -> float:
        """Copy the state and write it in the background; return how long training stalled.

        Blocks while the previous save is being written.
        """
        self.wait()
        tensors = self._memory.copy(state.tensors)
        stalled_s = time.perf_counter() - started_s
        copied = WorkerState(tensors, state.per_worker, state.shared)
        work = lambda: self._run(plan, copied, stalled_s)  # noqa: E731
        self._thread = threading.Thread(target=work, name="paceline checkpoint", daemon=True)
        self._thread.start()
        return stalled_s

    def wait(self) -> SaveOutcome | None:
        """Wait until the last save is written; return its result."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._last

    def close(self) -> None:
        """Wait for the last save; its result has been logged."""
        self.wait()

    def _run(self, plan: SavePlan, state: WorkerState, stalled_s: float) -> None:
        started_s = time.perf_counter()
        outcome = SaveOutcome(plan.step, 0.0, stalled_s)
        try:
            self._memory.wait()
            path, num_bytes = self._write(plan, state)
            took_s = time.perf_counter() - started_s
            outcome = SaveOutcome(plan.step, took_s, stalled_s, num_bytes, path)
        except PacelineError as error:
            outcome = SaveOutcome(
                plan.step, time.perf_counter() - started_s, stalled_s, error=error
            )
        except Exception as error:  # a bug must not disappear with the thread
            wrapped = CheckpointError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            outcome = SaveOutcome(
                plan.step, time.perf_counter() - started_s, stalled_s, error=wrapped
            )
        self._last = outcome
        self._on_end(outcome)

    def _write(self, plan: SavePlan, state: WorkerState) -> tuple[Path | None, int]:
        directory = staging.begin(plan.root, plan.step, plan.nonce)
        is_first = plan.number == 0
        try:
            record = writing.write_part(directory, plan.number, state.tensors)
            if not is_first:
                writing.write_record(directory, plan.number, record, state.per_worker)
                return None, record.bytes
            return self._publish(plan, directory, record, state)
        except PacelineError as error:
            self._abandon(directory, plan.number, error, is_first=is_first)
            raise

    def _publish(
        self, plan: SavePlan, directory: Path, record: manifest.PartRecord, state: WorkerState
    ) -> tuple[Path, int]:
        rest = range(1, len(plan.positions))
        left = writing.collect_records(directory, rest, wait_s=_PARTS_S)
        records = [record, *(one.record for one in left.values() if one.record is not None)]
        workers = [plan.departed.get(position) for position in range(plan.num_workers)]
        owns = [state.per_worker, *(one.plain for one in left.values())]
        for position, own in zip(plan.positions, owns, strict=True):
            workers[position] = own
        models = state.shared["models"]
        content: dict[str, Any] = {
            "pace": models[0]["pace"] if models else "",
            "common": state.shared,
            "workers": workers,
        }
        described = manifest.make(
            step=plan.step, world=plan.num_workers, content=content, parts=records
        )
        path = writing.publish(directory, described)
        writing.retain(plan.root, plan.keep, saved=path)
        while self._abandoned:  # by now no worker writes to them
            staging.abandon(self._abandoned.pop())
        return path, described.num_bytes

    def _abandon(
        self, directory: Path, number: int, error: PacelineError, *, is_first: bool
    ) -> None:
        """Remove the save; a worker other than the first reports that its part failed."""
        try:
            if is_first:
                self._abandoned.append(directory)
                staging.abandon(directory)
            elif staging.outer_of(directory).is_dir():
                writing.write_failure(directory, number, str(error))
        except CheckpointError:
            return  # the disk refuses that too; the first worker stops waiting after a timeout
