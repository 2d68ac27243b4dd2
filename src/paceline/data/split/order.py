"""The order of samples of one pass, the same on all ranks.

Every rank can compute the order of a plain or shuffled loader by itself: LocalOrder. It cannot
compute that of a custom sampler, which may be random, or use the time of day. So the first worker
iterates its sampler and broadcasts the indices: SamplerOrder. It broadcasts in chunks, because a
sampler may be endless, and only when all ranks are between two batches: `prepare()` is collective,
`units()` is not. They are separate because a DataLoader with workers prefetches from the order, on
each rank as far as it likes.

All workers keep the indices that have not counted yet, because they may be needed again, and a
DIGEST of all indices that were broadcast. If the worker that broadcasts is lost, its indices stay
valid. If more are needed, the next worker iterates its own sampler from the beginning. It continues
after the known indices if the digest is the same up to there. A sampler that gives other indices
each time cannot be continued.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.comm.group import Group
from paceline.comm.object_collectives import broadcast_object
from paceline.data.cursor.cursor import StateOrigin
from paceline.data.randomness import State, save_random_state, with_random_state
from paceline.data.split.weights import Units, size_of
from paceline.errors import UsageError
from paceline.state.serializer import unflatten_state

CHUNK = 16_384  # indices that are read from a sampler and broadcast at a time

RunCollective = Callable[[Callable[[], Any]], Any]  # repeats a collective after a loss


def draw(count: int, samples: int, seed: int) -> np.ndarray:
    """Return `count` random indices of 0 to samples - 1, ascending."""
    generator = torch.Generator().manual_seed(seed)
    drawn: np.ndarray = torch.randperm(samples, generator=generator)[:count].sort().values.numpy()
    return drawn


class LocalOrder:
    """The indices 0 to samples - 1, or those `drawn` of them, in order or shuffled by a seed."""

    def __init__(self, samples: int, seed: int | None, drawn: np.ndarray | None = None) -> None:
        self._indices: Any = range(samples) if drawn is None else drawn  # or an array
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            positions = torch.randperm(samples, generator=generator).numpy()
            self._indices = positions if drawn is None else drawn[positions]
        self.length = samples

    def prepare(self, units: int) -> None:
        """Do nothing: all indices are known."""

    def units(self, start: int, stop: int) -> Units:
        """Return indices by their position in the order."""
        units: Units = self._indices[start:stop]
        return units


class SamplerOrder:
    """What the first worker's sampler yields; without a group, this worker's own. `length` is known
    when the sampler has ended."""

    def __init__(
        self, group: Group | None, sampler: Iterable[Any], run_collective: RunCollective
    ) -> None:
        self.group, self._sampler, self._run_collective = group, sampler, run_collective
        self.length: int | None = None
        self._kept: list[Any] = []
        self._start = 0  # position of the first kept unit
        self._digest = b""
        self._reader: _SamplerReader | None = None  # on the worker that broadcasts
        self._draws: State | None = None  # generator states when the sampler began, if known
        self._is_resumed = False

    @property
    def num_received(self) -> int:
        """How many units have been received since the beginning."""
        return self._start + len(self._kept)

    def prepare(self, units: int) -> None:
        """Receive units until there are so many since the beginning, or the sampler ends."""
        while self.length is None and self.num_received < units:
            chunk = _ChunkExchange(self)
            received, has_ended, problem = self._run_collective(chunk.exchange)
            if chunk.failure is not None:
                raise chunk.failure
            if problem is not None:
                raise UsageError(f"pl.shard: {problem}")
            self._add(received)
            if has_ended:
                self.length = self.num_received

    def units(self, start: int, stop: int) -> Units:
        """Return units by their position in the order."""
        if stop > self.num_received and self.length is None:
            raise UsageError(
                "pl.shard: the loader asks for batches further ahead than its num_workers x"
                " prefetch_factor, as a plain DataLoader never does; pass one of those"
            )
        assert start >= self._start, "committed units are not needed again"
        return self._kept[start - self._start : stop - self._start]

    def forget(self, units: int) -> None:
        """Drop the units before a position in the order."""
        count = min(units - self._start, len(self._kept))
        if count > CHUNK:  # not at every step
            del self._kept[:count]
            self._start += count

    def state(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "start": self._start,
            "kept": list(map(to_plain_index, self._kept)),
            "digest": self._digest.hex(),
            "ended": self.length is not None,
            "draws": self._draws,
        }

    def load(self, state: Mapping[str, Any], origin: StateOrigin) -> None:
        """Continue from the state of a peer or checkpoint. Workers that were at different batches
        cannot wait for a broadcast: each iterates its own sampler."""
        self._start = state["start"]
        self._kept = [unflatten_state(unit, ()) for unit in state["kept"]]
        self._digest = bytes.fromhex(state["digest"])
        self.length = self.num_received if state["ended"] else None
        if origin.is_resumed:
            self._draws, self._is_resumed = state["draws"], True
        if origin.are_workers_apart:
            self.group = None

    def read(self) -> tuple[list[Any], bool, str | None]:
        """On the worker that broadcasts, return the next chunk, or what is wrong."""
        if self._reader is None or self._reader.count > self.num_received:
            self._start_reading()
        reader = self._reader
        assert reader is not None
        if reader.count != self.num_received or reader.digest != self._digest:
            return [], True, _cannot_continue(self._sampler, is_resumed=self._is_resumed)
        return reader.read()

    def _start_reading(self) -> None:
        """Iterate the sampler up to the units that have been received."""
        owners = generator_owners(self._sampler)
        if self._draws is None and self.num_received == 0:
            self._draws = save_random_state(owners)
            self._reader = _SamplerReader(self._sampler)
            return
        with with_random_state(self._draws, owners):
            self._reader = _SamplerReader(self._sampler)
            while self._reader.count < self.num_received and not self._reader.read()[1]:
                pass

    def _add(self, units: list[Any]) -> None:
        self._digest = _chained(self._digest, units)
        self._kept += (unflatten_state(unit, ()) for unit in units)


class _SamplerReader:
    """A sampler that is being iterated, in chunks that are the same each time."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._iterator: Iterator[Any] = iter(sampler)
        self.count = 0
        self.digest = b""

    def read(self) -> tuple[list[Any], bool, None]:
        """Return the next chunk, and whether it is the last."""
        units, indices, has_ended = list[Any](), 0, True
        for unit in self._iterator:
            units.append(to_plain_index(unit))
            indices += size_of(units[-1])
            if indices >= CHUNK:
                has_ended = False
                break
        self.count += len(units)
        self.digest = _chained(self.digest, units)
        return units, has_ended, None


class _ChunkExchange:
    """One broadcast. It may be repeated, but the sampler is read only once."""

    def __init__(self, order: SamplerOrder) -> None:
        self._order = order
        self._read: tuple[list[Any], bool, str | None] | None = None
        self.failure: Exception | None = None

    def exchange(self) -> Any:
        group = self._order.group
        if (group is None or group.rank == 0) and self._read is None:
            self._read = self._try_read()
        return self._read if group is None else broadcast_object(group, self._read)

    def _try_read(self) -> tuple[list[Any], bool, str | None]:
        try:
            return self._order.read()
        except Exception as error:  # broadcast, then raised on all workers
            self.failure = error
            problem = f"the sampler of rank 0 raised {type(error).__name__}: {error}"
            return [], True, problem


def generator_owners(sampler: Any) -> list[Any]:
    """Return the objects that may have the generator of a sampler."""
    return [sampler, getattr(sampler, "sampler", None)]


def _cannot_continue(sampler: object, *, is_resumed: bool) -> str:
    if is_resumed:
        return (
            f"the sampler ({type(sampler).__name__}) gives other indices than before the"
            " checkpoint, so this epoch cannot be continued; seed it by the epoch (set_epoch), or"
            " give it a generator (generator=torch.Generator().manual_seed(...))"
        )
    return (
        "the worker that broadcast the sampler's indices is lost, and another cannot continue:"
        f" its own sampler ({type(sampler).__name__}) gives other indices; seed it identically on"
        " all workers (generator=torch.Generator().manual_seed(...)), or use shuffle=True"
    )


def _chained(digest: bytes, units: list[Any]) -> bytes:
    return hashlib.blake2b(digest + msgspec.msgpack.encode(units), digest_size=16).digest()


def to_plain_index(unit: Any) -> Any:
    """Return an index as plain data: numbers, strings, lists of them, and tuples as the serializer
    writes them (`unflatten_state` restores the index)."""
    if isinstance(unit, (int, str)):
        return unit
    if isinstance(unit, (torch.Tensor, np.ndarray)) and unit.ndim > 0:
        return unit.tolist()
    if isinstance(unit, list):
        if not unit:
            raise UsageError("the batch sampler gave an empty batch; skip such batches")
        return [to_plain_index(index) for index in unit]
    if isinstance(unit, tuple):
        return {"tuple": [to_plain_index(index) for index in unit]}
    try:
        return operator.index(unit)
    except TypeError:
        raise UsageError(
            f"the sampler gave an index of type {type(unit).__name__}, which cannot be sent to the"
            " other ranks; use numbers, strings, or lists and tuples of them"
        ) from None
