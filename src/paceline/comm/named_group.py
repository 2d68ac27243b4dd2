"""NamedGroup: collectives that members may start in any order, matched by name.

A name stands for one operation at a time. If members start it with tensors that do not match, this
operation ends with CollectiveMismatch on all of them; the group continues. Members that start
operations in the same order pay nothing for the names (cpp/paceline/collectives/named.h).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline import _core
from paceline.comm.group import KINDS, Group
from paceline.comm.tensors import Buffer
from paceline.errors import UsageError

ANY_SIZE = frozenset({"all_gather", "all_to_all"})  # the engine allocates their results


class NamedGroup:
    """A group of the engine whose operations have names. Thread-safe."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._started: dict[tuple[str, str], _core.Work] = {}  # by kind and name

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def all_reduce(self, name: str, source: Buffer, target: Buffer, op: int, detail: int) -> None:
        """Reduce a tensor and wait for the result."""
        if self._started:
            self._require_free("all_reduce", name)
        self._group.engine_group().all_reduce_named(
            name,
            detail,
            source.address,
            target.address,
            source.count,
            source.dtype,
            op,
            source.shape,
        )

    def start(
        self,
        kind: str,
        name: str,
        sources: Sequence[Buffer] = (),
        targets: Sequence[Buffer] = (),
        *,
        shape: Sequence[int] = (),
        op: int = 0,
        root: int = 0,
        detail: int = 0,
        background: bool = True,
    ) -> _core.Work:
        """Start an operation; `shape` is that of the whole tensor."""
        self._require_free(kind, name)
        first = next(iter((*sources, *targets)), None)
        work = self._group.engine_group().start_named(
            name,
            detail,
            KINDS[kind],
            first.dtype if first is not None else 0,
            op,
            root,
            [buffer.part for buffer in sources],
            [buffer.part for buffer in targets],
            shape,
            kind in ANY_SIZE,
            background,
        )
        self._started[kind, name] = work
        self._group.keep_alive(work, (sources, targets))
        return work

    def _require_free(self, kind: str, name: str) -> None:
        for key in [key for key, work in self._started.items() if work.done()]:
            self._started.pop(key, None)
        if (kind, name) in self._started:
            raise UsageError(
                f"rank {self.rank}: {kind} {name!r} has been started and has not finished; wait for"
                " it (synchronize), or give this operation another name"
            )

    def close(self) -> None:
        """Release the group's resources."""
        self._group.close()
