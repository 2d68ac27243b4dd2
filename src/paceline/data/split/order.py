"""The order of samples of one pass, the same on all ranks.

A plain or shuffled loader's order can be worked out by every rank alone: LocalOrder. The order of a
user's sampler cannot (it may be random, or ask the time of day), so the first worker iterates its
own and tells the others: KeptOrder. It tells in chunks, since a sampler may be endless, and only
when all ranks are between two batches: `prepare()` is collective, `units()` is not. A DataLoader
with workers takes from the order ahead of time, each rank as far as it likes, hence the two.

All workers keep what was told and has not counted yet, because it may be needed again, and a DIGEST
of everything that was told. When the worker that told is lost, what it told stands. If more is
needed, the next one iterates its own sampler from the beginning, and goes on after what was told if
the digest is the same up to there. A sampler that gives something else each time cannot be
continued.
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
from paceline.data.cursor.cursor import Arrival
from paceline.data.randomness import State, as_then, remembered
from paceline.data.split.weights import Units, size_of
from paceline.errors import UsageError

CHUNK = 16_384  # indices that are read from a sampler and told at a time

Together = Callable[[Callable[[], Any]], Any]  # takes a collective step, repeated after a loss


def draw(count: int, samples: int, seed: int) -> np.ndarray:
    """Draw so many of the indices 0 to samples - 1; ascending."""
    generator = torch.Generator().manual_seed(seed)
    drawn: np.ndarray = torch.randperm(samples, generator=generator)[:count].sort().values.numpy()
    return drawn


class LocalOrder:
    """The indices 0 to samples - 1, or those `drawn` of them, in order or shuffled by a seed."""

    def __init__(self, samples: int, seed: int | None, drawn: np.ndarray | None = None) -> None:
        self._indices: Any = range(samples) if drawn is None else drawn  # or an array
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            places = torch.randperm(samples, generator=generator).numpy()
            self._indices = places if drawn is None else drawn[places]
        self.length = samples

    def prepare(self, units: int) -> None:
        """Nothing to do: all indices are there."""

    def units(self, start: int, stop: int) -> Units:
        """Return indices by their place in the order."""
        units: Units = self._indices[start:stop]
        return units


class KeptOrder:
    """What the first worker's sampler yields; without a group, this worker's own. `length` is known
    when it has ended."""

    def __init__(self, group: Group | None, sampler: Iterable[Any], together: Together) -> None:
        self.group, self._sampler, self._together = group, sampler, together
        self.length: int | None = None
        self._kept: list[Any] = []
        self._start = 0  # place of the first one that is kept
        self._digest = b""
        self._source: _Source | None = None  # on the worker that tells
        self._draws: State | None = None  # of the generators when the sampler began, if known
        self._is_resumed = False

    @property
    def told(self) -> int:
        """How many units have been told."""
        return self._start + len(self._kept)

    def prepare(self, units: int) -> None:
        """Hear until so many units since the beginning are here, or the sampler ends."""
        while self.length is None and self.told < units:
            chunk = _Chunk(self)
            told, has_ended, problem = self._together(chunk.exchange)
            if chunk.failure is not None:
                raise chunk.failure
            if problem is not None:
                raise UsageError(f"pl.shard: {problem}")
            self._add(told)
            if has_ended:
                self.length = self.told

    def units(self, start: int, stop: int) -> Units:
        """Return units by their place in the order."""
        if stop > self.told and self.length is None:
            raise UsageError(
                "pl.shard: the loader asks for batches further ahead than its num_workers x"
                " prefetch_factor, as a plain DataLoader never does; pass one of those"
            )
        assert start >= self._start, "units that have counted are not needed again"
        return self._kept[start - self._start : stop - self._start]

    def forget(self, units: int) -> None:
        """Let go of what lies before a place in the order."""
        count = min(units - self._start, len(self._kept))
        if count > CHUNK:  # not at every step
            del self._kept[:count]
            self._start += count

    def state(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "start": self._start,
            "kept": list(map(portable, self._kept)),
            "digest": self._digest.hex(),
            "ended": self.length is not None,
            "draws": self._draws,
        }

    def load(self, state: Mapping[str, Any], how: Arrival) -> None:
        """Go on from what was told elsewhere. Workers that were not at the same batches cannot wait
        for one of them to tell: each iterates its own sampler."""
        self._start = state["start"]
        self._kept = list(map(restored, state["kept"]))
        self._digest = bytes.fromhex(state["digest"])
        self.length = self.told if state["ended"] else None
        if how.is_resumed:
            self._draws, self._is_resumed = state["draws"], True
        if how.is_alone:
            self.group = None

    def read(self) -> tuple[list[Any], bool, str | None]:
        """On the worker that tells: read the next chunk; or say what is wrong."""
        if self._source is None or self._source.count > self.told:
            self._begin_to_read()
        source = self._source
        assert source is not None
        if source.count != self.told or source.digest != self._digest:
            return [], True, _cannot_go_on(self._sampler, is_resumed=self._is_resumed)
        return source.read()

    def _begin_to_read(self) -> None:
        """Iterate the sampler, up to what has been told."""
        things = generators_of(self._sampler)
        if self._draws is None and self.told == 0:
            self._draws = remembered(things)
            self._source = _Source(self._sampler)
            return
        with as_then(self._draws, things):
            self._source = _Source(self._sampler)
            while self._source.count < self.told and not self._source.read()[1]:
                pass

    def _add(self, units: list[Any]) -> None:
        self._digest = _chained(self._digest, units)
        self._kept += map(restored, units)


class _Source:
    """A sampler under way. It is read in chunks that are the same each time."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._iterator: Iterator[Any] = iter(sampler)
        self.count = 0
        self.digest = b""

    def read(self) -> tuple[list[Any], bool, None]:
        """Read the next chunk; say whether it is the last."""
        units, indices, has_ended = list[Any](), 0, True
        for unit in self._iterator:
            units.append(portable(unit))
            indices += size_of(units[-1])
            if indices >= CHUNK:
                has_ended = False
                break
        self.count += len(units)
        self.digest = _chained(self.digest, units)
        return units, has_ended, None


class _Chunk:
    """One exchange, which may be repeated: who tells reads only once."""

    def __init__(self, order: KeptOrder) -> None:
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
        except Exception as error:  # told, then raised on all workers
            self.failure = error
            said = f"the sampler of rank 0 raised {type(error).__name__}: {error}"
            return [], True, said


def generators_of(sampler: Any) -> list[Any]:
    """Return whatever of a sampler may have a generator of its own."""
    return [sampler, getattr(sampler, "sampler", None)]


def _cannot_go_on(sampler: object, *, is_resumed: bool) -> str:
    if is_resumed:
        return (
            f"the sampler ({type(sampler).__name__}) gives other indices than before the checkpoint"
            " was made, so this epoch cannot be continued; seed it by the epoch (set_epoch), or"
            " give it a generator (generator=torch.Generator().manual_seed(...))"
        )
    return (
        "the worker that told the sampler's indices to the others is lost, and another has to go"
        f" on; but its own sampler ({type(sampler).__name__}) gives other indices; seed it alike on"
        " all workers (generator=torch.Generator().manual_seed(...)), or use shuffle=True"
    )


def _chained(digest: bytes, units: list[Any]) -> bytes:
    return hashlib.blake2b(digest + msgspec.msgpack.encode(units), digest_size=16).digest()


def portable(unit: Any) -> Any:
    """Turn an index into plain data: numbers, strings, lists of them, and tuples as dicts."""
    if isinstance(unit, (int, str)):
        return unit
    if isinstance(unit, (torch.Tensor, np.ndarray)) and unit.ndim > 0:
        return unit.tolist()
    if isinstance(unit, list):
        if not unit:
            raise UsageError("the batch sampler gave an empty batch; leave such batches out")
        return [portable(index) for index in unit]
    if isinstance(unit, tuple):
        return {"tuple": [portable(index) for index in unit]}
    try:
        return operator.index(unit)
    except TypeError:
        raise UsageError(
            f"the sampler gave an index of type {type(unit).__name__}, which cannot be sent to the"
            " other ranks; use numbers, strings, or lists and tuples of them"
        ) from None


def restored(unit: Any) -> Any:
    """Turn plain data into the index again."""
    if isinstance(unit, dict):
        return tuple(restored(index) for index in unit["tuple"])
    return [restored(index) for index in unit] if isinstance(unit, list) else unit
