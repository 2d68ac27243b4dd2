"""Group: some ranks of the job and the operations that they do together.

Ranks and roots in these calls are relative to the group: `new_group([0, 2, 4, 6])` has ranks 0
to 3. Every member calls the same collectives in the same order; members that disagree all get
CollectiveMismatch. Each operation blocks and returns its result, or with `async_op=True` returns a
Work at once; memory given to an asynchronous operation must not be touched before its Work is done.
Several operations may be in flight: collectives of a group run in order, sends and receives and
other groups beside them. All methods may be called from any thread.

The membership of a group can change: `reconfigure()` ends what is in flight with GenerationChanged
and forms the group anew from the members that are left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from paceline import _core
from paceline.comm.fabric import Fabric, identity
from paceline.comm.tensors import (
    Buffer,
    Tensor,
    empty_like,
    op_code,
    require_alike,
    result_buffer,
    split_rows,
)
from paceline.control.member import Membership
from paceline.errors import UsageError
from paceline.runtime.work import Handle, Work

Result = TypeVar("Result")

_KINDS = {name: code for code, name in enumerate(_core.KINDS)}


class Group:
    """Some ranks of the job; made by `pl.world()` and `pl.new_group()`."""

    def __init__(
        self,
        fabric: Fabric,
        ranks: Sequence[int],
        timeout_s: float | None = None,
        *,
        name: str = "",
        generation: int | None = None,
        membership: Membership | None = None,
    ) -> None:
        """Form a group; members find each other by its name, without one by counting groups.

        All give the same generation; without one it is that of the membership, which is then to be
        the same on all. `membership` is the fabric's, or a newer one that has its members.
        """
        self._fabric = fabric
        self.timeout_s = fabric.timeout_s if timeout_s is None else timeout_s  # of one operation
        self._id = identity(name) if name else fabric.next_id(ranks)
        known = fabric.membership if membership is None else membership
        self._seat(tuple(ranks), known.generation if generation is None else generation)
        self._core = self._make_core(known)

    def _seat(self, ranks: tuple[int, ...], generation: int) -> None:
        self.generation = generation
        self.ranks = ranks  # global ranks of the members
        self.size = len(ranks)
        self.rank = ranks.index(self._fabric.rank)
        self._lock = threading.Lock()
        # Operations and the memory that they work on; guarded by: _lock
        self._in_flight: deque[tuple[Handle, object]] = deque()

    def _make_core(self, membership: Membership) -> _core.Group:
        return self._fabric.create_group(
            self._id, self.generation, membership, self.ranks, self.timeout_s
        )

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, ranks={list(self.ranks)}, generation={self.generation})"

    # -- reductions ---------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, out: Tensor | None = None, async_op: bool = False
    ) -> Tensor | Work[Tensor]:
        """Combine the tensors of all ranks; the result lands on every rank, in place or in `out`.

        `op` is sum, mean, min, max, product, band, bor or bxor. Ranks are combined in rank order,
        so the same inputs always give the same bits.
        """
        source = Buffer(tensor)
        code = op_code(op, source.dtype)
        if out is None:
            target, out = source, tensor
        else:
            target = result_buffer(out)
            require_alike(source, target, "all_reduce")
        arguments = (source.address, target.address, source.count, source.dtype, code, source.shape)
        if not async_op:
            self._core.all_reduce(*arguments)
            target.write_back()
            return out
        return self._track(self._core.start_all_reduce(*arguments), [source], [target], out)

    def reduce(
        self,
        tensor: Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Tensor | None | Work[Tensor | None]:
        """Combine the tensors of all ranks on `root`, in place or in `out`; others keep theirs."""
        source, targets, result = Buffer(tensor), list[Buffer](), None
        if self.rank == self._check_root(root):
            result = tensor if out is None else out
            targets = [source if out is None else result_buffer(result)]
            require_alike(source, targets[0], "reduce")
        code = op_code(op, source.dtype)
        return self._call("reduce", [source], targets, result, async_op, op=code, root=root)

    def reduce_scatter(
        self,
        tensor: Tensor | Sequence[Tensor],
        op: str = "sum",
        *,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Combine what all ranks have and leave each rank its own part of the result.

        `tensor` is one tensor, cut along its first dimension, or a list with a part for each rank.
        """
        parts = self._parts(tensor)
        if out is None:
            out = empty_like(parts[self.rank])
        sources, target = [Buffer(part) for part in parts], result_buffer(out)
        if target.count != sources[self.rank].count or target.dtype != sources[self.rank].dtype:
            require_alike(sources[self.rank], target, "reduce_scatter")
        code = op_code(op, target.dtype)
        return self._call("reduce_scatter", sources, [target], out, async_op, op=code)

    # -- moving -------------------------------------------------------------------------------

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Tensor | Work[Tensor]:
        """Copy the root's tensor into everybody's `tensor`."""
        if self.rank == self._check_root(root):
            return self._call("broadcast", [Buffer(tensor)], [], tensor, async_op, root=root)
        return self._call("broadcast", [], [result_buffer(tensor)], tensor, async_op, root=root)

    def all_gather(
        self,
        tensor: Tensor,
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Give every rank the tensors of all ranks, in rank order.

        Without `out` all tensors must have the shape of the own one. `out` is a list of tensors,
        which may differ in size from rank to rank, or one tensor that is cut along its first
        dimension.
        """
        outs = [empty_like(tensor) for _ in self.ranks] if out is None else self._parts(out)
        targets = [result_buffer(part) for part in outs]
        return self._call("all_gather", [Buffer(tensor)], targets, outs, async_op)

    def gather(
        self,
        tensor: Tensor,
        root: int = 0,
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
    ) -> list[Tensor] | None | Work[list[Tensor] | None]:
        """Give `root` the tensors of all ranks (see all_gather); the others get None."""
        outs: list[Tensor] | None = None
        if self.rank == self._check_root(root):
            outs = [empty_like(tensor) for _ in self.ranks] if out is None else self._parts(out)
        elif out is not None:
            raise UsageError(
                f"gather: rank {self.rank} passed `out`, but only root {root} receives"
            )
        targets = [result_buffer(part) for part in outs or []]
        return self._call("gather", [Buffer(tensor)], targets, outs, async_op, root=root)

    def scatter(
        self,
        tensor: Tensor,
        parts: Tensor | Sequence[Tensor] | None = None,
        *,
        root: int = 0,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Fill `tensor` with this rank's part of what `root` gives as `parts`."""
        sources: list[Buffer] = []
        if self.rank == self._check_root(root):
            if parts is None:
                raise UsageError(f"scatter: root {root} must pass `parts`, one for each rank")
            sources = [Buffer(part) for part in self._parts(parts)]
        elif parts is not None:
            raise UsageError(f"scatter: rank {self.rank} passed `parts`, but root is {root}")
        return self._call("scatter", sources, [result_buffer(tensor)], tensor, async_op, root=root)

    def all_to_all(
        self,
        parts: Tensor | Sequence[Tensor],
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Send part j to rank j; return what the ranks sent here, in rank order.

        Parts may differ in size; pass `out` when what arrives has other sizes than what leaves.
        """
        sent = self._parts(parts)
        outs = [empty_like(part) for part in sent] if out is None else self._parts(out)
        targets = [result_buffer(part) for part in outs]
        return self._call("all_to_all", [Buffer(part) for part in sent], targets, outs, async_op)

    def barrier(self, *, async_op: bool = False) -> None | Work[None]:
        """Wait until every rank has come here."""
        return self._call("barrier", [], [], None, async_op)

    # -- point to point -----------------------------------------------------------------------

    def send(
        self, tensor: Tensor, to: int, *, tag: int = 0, async_op: bool = False
    ) -> None | Work[None]:
        """Send a tensor to one rank, which receives it with the same tag."""
        source = Buffer(tensor)
        self._check_peer(to, tag, "send")
        handle = self._core.start_send(
            to, tag, source.address, source.count, source.dtype, async_op
        )
        self.keep(handle, source)
        work = Work(handle, lambda: None, source)
        return work if async_op else work.wait()

    def recv(
        self,
        tensor: Tensor,
        source: int | None = None,
        *,
        tag: int = 0,
        async_op: bool = False,
        background: bool = True,
    ) -> int | Work[int]:
        """Receive a tensor from one rank, or from any when `source` is None; return the sender.

        An asynchronous receive that somebody is going to wait for anyway need not make progress
        in the background, which costs wake-ups: `background=False`.
        """
        target = result_buffer(tensor)
        self._check_peer(source, tag, "recv")
        member = -1 if source is None else source
        handle = self._core.start_receive(
            member, tag, target.address, target.count, target.dtype, async_op and background
        )

        def finish() -> int:
            target.write_back()
            return handle.source()

        self.keep(handle, target)
        work = Work(handle, finish, target)
        return work if async_op else work.wait()

    # -- membership ---------------------------------------------------------------------------

    def reconfigure(self, membership: Membership) -> None:
        """Form the group anew from those of its members that the given membership has.

        Operations in flight end with GenerationChanged. Every remaining member must call this with
        the same membership, whose generation must be higher than the group's.
        """
        if membership.generation <= self.generation:
            raise UsageError(
                f"reconfigure to generation {membership.generation}, but the group is at"
                f" {self.generation}: generations only grow"
            )
        staying = tuple(rank for rank in self.ranks if rank in membership.ranks)
        if self._fabric.rank not in staying:
            raise UsageError(
                f"rank {self._fabric.rank} is not in generation {membership.generation}"
            )
        self._core.fail(
            f"rank {self._fabric.rank}: the membership changed from generation {self.generation} to"
            f" {membership.generation}; repeat the operation in the new group"
        )
        self._core.close()
        self._seat(staying, membership.generation)
        self._core = self._make_core(membership)

    def close(self) -> None:
        """Release what the group holds; operations in flight end with GenerationChanged."""
        self._core.close()

    # -- plumbing -----------------------------------------------------------------------------

    def _call(
        self,
        kind: str,
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        result: Result,
        async_op: bool,
        *,
        op: int = 0,
        root: int = 0,
    ) -> Result | Work[Result]:
        first = sources[0] if sources else targets[0] if targets else None
        dtype, shape = (first.dtype, first.shape) if first is not None else (0, ())
        for buffer in (*sources, *targets):
            if buffer.dtype != dtype:
                raise UsageError(
                    f"{kind}: tensors of {_core.DTYPES[dtype]} and {_core.DTYPES[buffer.dtype]} in"
                    " one call; convert them to one dtype"
                )
        inputs, outputs = [b.part for b in sources], [b.part for b in targets]
        arguments = (_KINDS[kind], dtype, op, root, inputs, outputs, shape)
        if async_op:
            return self._track(self._core.start(*arguments), sources, targets, result)
        self._core.run(*arguments)
        for target in targets:
            target.write_back()
        return result

    def _track(
        self,
        handle: _core.Work,
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        result: Result,
    ) -> Work[Result]:
        def finish() -> Result:
            for target in targets:
                target.write_back()
            return result

        self.keep(handle, (sources, targets))
        return Work(handle, finish, (sources, targets))

    def keep(self, handle: Handle, memory: object) -> None:
        """Hold on to the memory of an operation in flight, also when the caller drops its Work."""
        with self._lock:
            while self._in_flight and self._in_flight[0][0].done():
                self._in_flight.popleft()
            self._in_flight.append((handle, memory))

    def _parts(self, tensor: Tensor | Sequence[Tensor]) -> list[Tensor]:
        if isinstance(tensor, (list, tuple)):
            if len(tensor) != self.size:
                raise UsageError(
                    f"got {len(tensor)} parts for a group of {self.size}; pass one for each rank"
                )
            return list(tensor)
        return split_rows(tensor, self.size)  # type: ignore[arg-type]

    def _check_root(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise UsageError(f"root {root} is not a rank of this group (0 to {self.size - 1})")
        return root

    def _check_peer(self, peer: int | None, tag: int, what: str) -> None:
        if peer is not None and (not 0 <= peer < self.size or peer == self.rank):
            raise UsageError(
                f"{what}: rank {peer} is not another rank of this group (0 to {self.size - 1},"
                f" this is {self.rank})"
            )
        if not 0 <= tag < 1 << 63:
            raise UsageError(f"{what}: tag {tag} must be a number from 0 to 2**63 - 1")


class PreparedAllReduce:
    """An all-reduce whose arguments have been checked, for memory that it is done on every step."""

    def __init__(self, group: Group, tensor: Tensor, op: str, out: Tensor) -> None:
        source, target = Buffer(tensor), result_buffer(out)
        require_alike(source, target, "all_reduce")
        if source.stands_in or target.stands_in:
            raise UsageError("a prepared all_reduce works on contiguous tensors")
        self._group, self._memory = group, (source, target)
        memory = (source.address, target.address, source.count, source.dtype)
        self._arguments = (*memory, op_code(op, source.dtype), source.shape)

    def start(self) -> Handle:
        """Start it, and return what it can be waited for with."""
        handle = self._group._core.start_all_reduce(*self._arguments)
        self._group.keep(handle, self._memory)
        return handle

    def run(self) -> None:
        """Do it, and wait."""
        self._group._core.all_reduce(*self._arguments)
