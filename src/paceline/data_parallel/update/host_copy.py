"""HostCopy: the parameters and the optimizer state of a host, once, which survive lost workers.

All workers of a host map this memory. Each worker updates a part of it, in CHUNKS: some shards
(ownership.py) that are updated together. A worker may be killed in the middle of a chunk. So it

    1. copies what the chunk holds to its LOG,       2. marks the chunk as begun,
    3. updates the chunk,                            4. marks it as done.

The log and the marks are in the same memory. After a loss the others see from the mark of the lost
worker which of its chunks are updated, and the log has the values of the one that was under way.
All workers have all averaged gradients, so each can finish the step by itself, in memory of its own
(`leave`). Nothing is written to the shared memory after a loss.

A log takes one chunk at a time. It stays in the cache, so it costs little beside the update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from paceline import _core
from paceline.comm.devices import in_own_storage
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate_on_host
from paceline.data_parallel.bucket import Bucket, ParamSlot
from paceline.data_parallel.update.chunks import (
    Chunk,
    Entries,
    Param,
    Piece,
    Place,
    make_chunk,
    params_of,
)
from paceline.data_parallel.update.optimizer_state import shard_value

_PAGE_BYTES = 4096
_LINE_BYTES = 64


class HostCopy:
    """The copy of one host. Collective to create, among the workers of the host."""

    def __init__(
        self,
        engine: _core.Engine,
        host: Group,
        optimizer: torch.optim.Optimizer,
        slots: Mapping[Param, ParamSlot],
        owned: Sequence[Sequence[Sequence[Piece]]],
    ) -> None:
        """Share what this worker holds of its own pieces; `owned` are the chunks of each worker."""
        self._optimizer_ref = weakref.ref(optimizer)
        self._owned, self._rank = owned, host.rank
        self._groups = [set(group["params"]) for group in optimizer.param_groups]
        self._trained = params_of(optimizer)
        self._slots = [slots[param] for param in self._trained]
        self.buckets = list(dict.fromkeys(slot.bucket for slot in self._slots))
        self.stateful = {param for param in self._trained if optimizer.state.get(param)}
        self._allocate(engine, host)
        self._fill(optimizer)
        host.barrier()  # everything is there
        self.steps = 0  # in this memory, with the present one
        for bucket in self.buckets:
            bucket.move_params(self._flats[bucket], self._shown[bucket])
        for param in self.stateful:
            del optimizer.state[param]
        self._addresses = [slot.shown.data_ptr() for slot in self._slots]

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()
        assert optimizer is not None, "its step is called, so it exists"
        return optimizer

    # -- the memory ---------------------------------------------------------------------------

    def _allocate(self, engine: _core.Engine, host: Group) -> None:
        starts, end = {}, 0
        for bucket in self.buckets:
            starts[bucket] = end
            end += _round_up(bucket.size * bucket.dtype.itemsize, _PAGE_BYTES)
        self._params = allocate_on_host(engine, host, (end,), torch.uint8)
        self._flats, self._shown = {}, {}
        for bucket, at in starts.items():
            size = bucket.size * bucket.dtype.itemsize
            self._flats[bucket] = self._params.shared[at : at + size].view(bucket.dtype)
            self._shown[bucket] = self._params.private[at : at + size].view(bucket.dtype)
        space = _Space()
        whole, counters = self._reserve_state(space)
        marks_at = space.take(8 * len(self._owned))
        logs = [(space.end, self._reserve_log(space, chunks)) for chunks in self._owned]
        self._rest = allocate_on_host(engine, host, (max(space.end, 1),), torch.uint8).shared
        self._state = {
            param: {key: self._at(start, like) for key, (start, like) in entries.items()}
            for param, entries in whole.items()
        }
        self._counters = {
            number: {key: self._at(start, like) for key, (start, like) in entries.items()}
            for number, entries in counters.items()
        }
        count = len(self._owned)
        self._marks = self._rest[marks_at : marks_at + 8 * count].view(torch.int64).numpy()
        params = {slot.param: slot.segment.view(self._flats[slot.bucket]) for slot in self._slots}
        self._shared = Place(params, self._state, self._counters)
        self._chunks = [make_chunk(pieces, self._shared, self._groups) for pieces in self._mine]
        self._logs = [start for start, _ in logs]
        self._saved = [self._saves(chunk) for chunk in self._chunks]

    def _reserve_state(self, space: _Space) -> tuple[Any, Any]:
        whole: dict[Param, dict[str, Any]] = {}
        counters: dict[int, dict[str, Any]] = {}
        for param in self._trained:
            for key, value in sorted(self._optimizer.state.get(param, {}).items()):
                if value.shape == param.shape:
                    where = space.take(param.numel() * value.dtype.itemsize)
                    like = torch.empty_strided(
                        param.size(), param.stride(), dtype=value.dtype, device="meta"
                    )
                    whole.setdefault(param, {})[key] = (where, like)
        for piece in self._pieces():
            for key, value in sorted(self._optimizer.state.get(piece.slot.param, {}).items()):
                if value.shape != piece.slot.param.shape:
                    where = space.take(value.numel() * value.dtype.itemsize)
                    like = torch.empty(value.shape, dtype=value.dtype, device="meta")
                    counters.setdefault(piece.number, {})[key] = (where, like)
        return whole, counters

    def _reserve_log(self, space: _Space, chunks: Sequence[Sequence[Piece]]) -> int:
        sizes = [0]
        for pieces in chunks:
            end = 0
            for piece in pieces:
                count, param = piece.range.stop - piece.range.start, piece.slot.param
                end += _round_up(count * param.element_size(), _LINE_BYTES)
                for value in self._optimizer.state.get(param, {}).values():
                    numbers = count if value.shape == param.shape else value.numel()
                    end += _round_up(numbers * value.dtype.itemsize, _LINE_BYTES)
            sizes.append(end)
        return space.take(max(sizes))

    def _at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        flat = self._rest[start : start + like.numel() * like.dtype.itemsize].view(like.dtype)
        if like.numel():
            flat = in_own_storage(flat)  # torch.save refuses a storage with two dtypes
        return flat.as_strided(like.size(), like.stride())

    def _saves(self, chunk: Chunk) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return where this worker saves a chunk, and what it saves there."""
        return self._log_of(self._rank, chunk), chunk.written()

    def _log_of(self, owner: int, chunk: Chunk) -> list[torch.Tensor]:
        """Return the places in a worker's log for what a chunk holds, in order."""
        at, places = self._logs[owner], []
        for tensor in chunk.written():
            size = tensor.numel() * tensor.dtype.itemsize
            flat = self._rest[at : at + size].view(tensor.dtype)
            places.append(flat.as_strided(tensor.size(), tensor.stride()))
            at += _round_up(size, _LINE_BYTES)
        return places

    def _pieces(self) -> Iterator[Piece]:
        for chunks in self._owned:
            for pieces in chunks:
                yield from pieces

    @property
    def _mine(self) -> Sequence[Sequence[Piece]]:
        return self._owned[self._rank]

    def _fill(self, optimizer: torch.optim.Optimizer) -> None:
        self._marks[self._rank] = 0
        with torch.no_grad():
            for piece in chain.from_iterable(self._mine):
                param = piece.slot.param
                piece.of(self._shared.params[param]).copy_(piece.of(param.detach()))
                whole = self._state.get(param, {})
                counters = self._counters.get(piece.number, {})
                for key, value in optimizer.state.get(param, {}).items():
                    there = piece.of(whole[key]) if key in whole else counters[key]
                    there.copy_(shard_value(value, param, piece.range))

    # -- steps --------------------------------------------------------------------------------

    def is_edited(self) -> bool:
        """Return whether this worker's script has changed its parameters since the last step."""
        addresses = [slot.param.data_ptr() for slot in self._slots]
        return addresses != self._addresses or self._params.is_changed()

    def begin_step(self) -> None:
        """Begin a step, before any worker updates anything."""
        self.steps += 1

    def run(self, step: Callable[[], Any]) -> Any:
        """Update this worker's chunks."""
        result, optimizer = None, self._optimizer
        mark = self.steps << 32
        for number, (chunk, saved) in enumerate(zip(self._chunks, self._saved, strict=True)):
            with torch.no_grad():
                torch._foreach_copy_(*saved)
            self._marks[self._rank] = mark | 2 * number + 1
            result = chunk.run(optimizer, step)
            self._marks[self._rank] = mark | 2 * number + 2
        return result

    def has_begun(self) -> bool:
        """Return whether a worker of the host has begun the present step."""
        return any(mark >> 32 == self.steps for mark in self._marks.tolist())

    def full_state(self) -> dict[torch.Tensor, Entries]:
        """Return the optimizer state of all parameters, where it is."""
        first: dict[Param, int] = {}
        for piece in self._pieces():
            first.setdefault(piece.slot.param, piece.number)
        return {
            param: {**self._state.get(param, {}), **self._counters.get(first[param], {})}
            for param in self._trained
            if param in self.stateful
        }

    # -- leaving it ---------------------------------------------------------------------------

    def leave(
        self,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
        step: Callable[[], Any] | None,
        *,
        keeps_state: bool,
    ) -> None:
        """Continue with this worker's own copy of everything.

        With `step`: some worker has begun the present step; finish it in the copy. All workers of
        the host that live have stopped. `keeps_state`: the optimizer has got other state meanwhile.
        """
        optimizer = self._optimizer
        flats = {bucket: allocate(bucket.size, bucket.dtype) for bucket in self.buckets}
        while True:  # a worker that was taken for lost may still run, until it is killed
            marks = self._marks.tolist()
            place = self._copy(flats)
            if step is not None:
                self._undo(place, marks)
            if self._marks.tolist() == marks:
                break
        if step is not None:
            self._finish(place, marks, step)
        for bucket, flat in flats.items():
            bucket.move_params(flat)
        if keeps_state:
            return
        first: set[Param] = set()
        for piece in self._pieces():
            param = piece.slot.param
            if param in self.stateful and param not in first:
                first.add(param)
                counters = place.counters.get(piece.number, {})
                optimizer.state[param] = {**place.state.get(param, {}), **counters}

    def _copy(self, flats: Mapping[Bucket, torch.Tensor]) -> Place:
        params: dict[Param, torch.Tensor] = {}
        with torch.no_grad():
            for bucket, flat in flats.items():
                flat.copy_(self._shown[bucket])
                for slot in bucket.slots:
                    params[slot.param] = slot.segment.view(flat)
                    if slot.param.data_ptr() != slot.shown.data_ptr():  # the script put another
                        params[slot.param].copy_(slot.param.detach())
            state = {p: _clones(entries) for p, entries in self._state.items()}
            counters = {number: _clones(entries) for number, entries in self._counters.items()}
        return Place(params, state, counters)

    def _undo(self, place: Place, marks: Sequence[int]) -> None:
        """Put back the values of chunks that were under way."""
        for owner, mark in enumerate(marks):
            number, is_open = divmod(mark & 0xFFFFFFFF, 2)
            if mark >> 32 == self.steps and is_open:
                chunk = make_chunk(self._owned[owner][number], place, self._groups)
                with torch.no_grad():
                    torch._foreach_copy_(chunk.written(), self._log_of(owner, chunk))

    def _finish(self, place: Place, marks: Sequence[int], step: Callable[[], Any]) -> None:
        """Update what no worker has updated in this step."""
        for owner, mark in enumerate(marks):
            done = (mark & 0xFFFFFFFF) // 2 if mark >> 32 == self.steps else 0
            for pieces in self._owned[owner][done:]:
                make_chunk(pieces, place, self._groups).run(self._optimizer, step)


class _Space:
    """Places in a region of memory, one after the other."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, size: int) -> int:
        """Return where the next `size` bytes are."""
        start = self.end
        self.end += _round_up(size, _LINE_BYTES)
        return start


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _clones(entries: Entries) -> Entries:
    return {key: value.clone() for key, value in entries.items()}
