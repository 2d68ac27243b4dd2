"""The order of a user's sampler in an elastic job: told by the first worker, kept by all.

As in order.py one worker iterates its sampler and tells the others; but here everybody keeps what
was told and has not counted yet, because it may be needed again, and a DIGEST of everything that
was told. When the worker that told is lost, what it told stands. If more is needed, the next one
iterates its own sampler from the beginning, and goes on behind what was told if the digest is the
same up to there. A sampler that gives something else each time cannot be continued.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from paceline.collectives.agreement import take_from
from paceline.collectives.group import Group
from paceline.data import order
from paceline.data.portable import portable, restored
from paceline.data.split import Units, size_of
from paceline.errors import UsageError

Together = Callable[[Callable[[], Any]], Any]  # takes a collective step, repeated after a loss


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
        if count > order.CHUNK:  # not at every step
            del self._kept[:count]
            self._start += count

    def pack(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "start": self._start,
            "kept": list(map(portable, self._kept)),
            "digest": self._digest.hex(),
            "ended": self.length is not None,
        }

    def load(self, told: Mapping[str, Any]) -> None:
        """Take over what another worker packed."""
        self._start = told["start"]
        self._kept = list(map(restored, told["kept"]))
        self._digest = bytes.fromhex(told["digest"])
        self.length = self.told if told["ended"] else None

    def read(self) -> tuple[list[Any], bool, str | None]:
        """On the worker that tells: read the next chunk; or say what is wrong."""
        if self._source is None or self._source.count > self.told:
            self._source = _Source(self._sampler)
        source = self._source
        while source.count < self.told:
            if not source.next():
                break
        if source.count != self.told or source.digest != self._digest:
            return [], True, _cannot_go_on(self._sampler)
        units, indices = list[Any](), 0
        while indices < order.CHUNK:
            if not source.next():
                return units, True, None
            units.append(source.unit)
            indices += size_of(source.unit)
        return units, False, None

    def _add(self, units: Iterable[Any]) -> None:
        for unit in units:
            self._digest = _chained(self._digest, unit)
            self._kept.append(restored(unit))


class _Source:
    """A sampler under way."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._iterator: Iterator[Any] = iter(sampler)
        self.count = 0
        self.digest = b""
        self.unit: Any = None

    def next(self) -> bool:
        """Take the next unit; false at the end."""
        for unit in self._iterator:
            self.unit = portable(unit)
            self.digest = _chained(self.digest, self.unit)
            self.count += 1
            return True
        return False


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
        return self._read if group is None else take_from(group, self._read)

    def _try_read(self) -> tuple[list[Any], bool, str | None]:
        try:
            return self._order.read()
        except Exception as error:  # told, then raised on all workers
            self.failure = error
            said = f"the sampler of rank 0 raised {type(error).__name__}: {error}"
            return [], True, said


def _cannot_go_on(sampler: object) -> str:
    return (
        "the worker that told the sampler's indices to the others is lost, and another has to go"
        f" on; but its own sampler ({type(sampler).__name__}) gives other indices; seed it alike on"
        " all workers (generator=torch.Generator().manual_seed(...)), or use shuffle=True"
    )


def _chained(digest: bytes, unit: Any) -> bytes:
    return hashlib.blake2b(digest + msgspec.msgpack.encode(unit), digest_size=16).digest()
