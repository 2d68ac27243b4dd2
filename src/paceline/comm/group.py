"""Group: some ranks of the job and their collective and point-to-point operations.

Ranks and roots in these calls are relative to the group: `new_group([0, 2, 4, 6])` has ranks 0
to 3. Every member calls the same collectives in the same order; if members disagree, all of them
raise CollectiveMismatch. Each operation blocks and returns its result, or with `async_op=True`
returns a Work at once. Do not touch the memory of an asynchronous operation before its Work is
done. Several operations may be in flight: collectives of a group run in order; sends, receives and
other groups run concurrently with them. All methods may be called from any thread.

Tensors on a device travel through pinned host memory (device_staging.py).

The membership of a group can change: `reconfigure()` ends operations in flight with
GenerationChanged and forms the group again from the remaining members.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from paceline import _core
from paceline.comm.engine_calls import EngineCalls
from paceline.comm.fabric import Fabric, group_id_of
from paceline.comm.tensors import (
    Buffer,
    Tensor,
    common_dtype,
    empty_like,
    known_op,
    op_code,
    require_match,
    split_rows,
)
from paceline.control.member import Membership
from paceline.errors import UsageError
from paceline.runtime.work import Handle, Work

Result = TypeVar("Result")

KINDS = {name: code for code, name in enumerate(_core.KINDS)}


class Group(EngineCalls):
    """Some ranks of the job; created by `pl.world()` and `pl.new_group()`."""

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
        """Form a group. Members find each other by its name, or without a name by the number of
        groups of these ranks so far.

        All members pass the same generation; the default is that of the membership, which must
        then be the same on all. `membership` is the fabric's, or a newer one with the same members.
        """
        self._fabric = fabric
        self.timeout_s = fabric.timeout_s if timeout_s is None else timeout_s  # of one operation
        self._id = group_id_of(name) if name else fabric.next_id(ranks)
        known = fabric.membership if membership is None else membership
        self._set_members(tuple(ranks), known.generation if generation is None else generation)
        self._core = self._make_core(known)

    def _set_members(self, ranks: tuple[int, ...], generation: int) -> None:
        self.generation = generation
        self.ranks = ranks  # global ranks of the members
        self.size = len(ranks)
        self.rank = ranks.index(self._fabric.rank)
        self._expect_calls(self._fabric.staging)

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
        """Reduce the tensors of all ranks; every rank gets the result, in place or in `out`.

        `op` is sum, mean, min, max, product, band, bor or bxor. Tensors are combined in rank order,
        so the same inputs always give the same bits.
        """
        if out is None and not async_op:  # the most frequent call takes a short path
            known = known_op(op)
            is_next = self._queue.last is None
            if known is not None and is_next and self._core.all_reduce_tensor(tensor, known):
                return tensor
        source = self._queue.source(tensor)
        code = op_code(op, source.dtype)
        if out is None:
            target, out = source, tensor
        else:
            target = self._queue.target(out)
            require_match(source, target, "all_reduce")
        arguments = (source.address, target.address, source.count, source.dtype, code, source.shape)
        if not async_op:
            source.arrive()
            self.engine_group().all_reduce(*arguments)
            target.write_back()
            return out
        handle = self._queue.start(partial(self._core.start_all_reduce, *arguments), [source])
        return self._track(handle, [source], [target], out)

    def reduce(
        self,
        tensor: Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Tensor | None | Work[Tensor | None]:
        """Reduce the tensors of all ranks to `root`, in place or in `out`; the tensors of the other
        ranks do not change."""
        source, targets, result = self._queue.source(tensor), list[Buffer](), None
        if self.rank == self._check_root(root):
            result = tensor if out is None else out
            targets = [source if out is None else self._queue.target(result)]
            require_match(source, targets[0], "reduce")
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
        """Reduce the tensors of all ranks and return this rank's part of the result.

        `tensor` is one tensor, split along its first dimension, or a list with a part per rank.
        """
        parts = self._parts(tensor)
        if out is None:
            out = empty_like(parts[self.rank])
        sources, target = [self._queue.source(part) for part in parts], self._queue.target(out)
        require_match(sources[self.rank], target, "reduce_scatter")
        code = op_code(op, target.dtype)
        return self._call("reduce_scatter", sources, [target], out, async_op, op=code)

    # -- moving -------------------------------------------------------------------------------

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Tensor | Work[Tensor]:
        """Copy the root's tensor into the `tensor` of every rank."""
        if self.rank == self._check_root(root):
            return self._call(
                "broadcast", [self._queue.source(tensor)], [], tensor, async_op, root=root
            )
        return self._call(
            "broadcast", [], [self._queue.target(tensor)], tensor, async_op, root=root
        )

    def all_gather(
        self,
        tensor: Tensor,
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Return the tensors of all ranks, in rank order, on every rank.

        Without `out` the tensors of all ranks must have the same shape. `out` is a list of tensors,
        which may differ in size from rank to rank, or one tensor that is split along its first
        dimension.
        """
        outs = [empty_like(tensor) for _ in self.ranks] if out is None else self._parts(out)
        targets = [self._queue.target(part) for part in outs]
        return self._call("all_gather", [self._queue.source(tensor)], targets, outs, async_op)

    def gather(
        self,
        tensor: Tensor,
        root: int = 0,
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
    ) -> list[Tensor] | None | Work[list[Tensor] | None]:
        """Return the tensors of all ranks on `root` (see all_gather); None on other ranks."""
        outs: list[Tensor] | None = None
        if self.rank == self._check_root(root):
            outs = [empty_like(tensor) for _ in self.ranks] if out is None else self._parts(out)
        elif out is not None:
            raise UsageError(
                f"gather: rank {self.rank} passed `out`, but only root {root} receives"
            )
        targets = [self._queue.target(part) for part in outs or []]
        return self._call(
            "gather", [self._queue.source(tensor)], targets, outs, async_op, root=root
        )

    def scatter(
        self,
        tensor: Tensor,
        parts: Tensor | Sequence[Tensor] | None = None,
        *,
        root: int = 0,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Fill `tensor` with this rank's part of the `parts` that `root` passes."""
        sources: list[Buffer] = []
        if self.rank == self._check_root(root):
            if parts is None:
                raise UsageError(f"scatter: root {root} must pass `parts`, one for each rank")
            sources = [self._queue.source(part) for part in self._parts(parts)]
        elif parts is not None:
            raise UsageError(f"scatter: rank {self.rank} passed `parts`, but root is {root}")
        return self._call(
            "scatter", sources, [self._queue.target(tensor)], tensor, async_op, root=root
        )

    def all_to_all(
        self,
        parts: Tensor | Sequence[Tensor],
        *,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Send part j to rank j; return the parts that the ranks sent here, in rank order.

        Parts may differ in size; pass `out` if the received sizes differ from the sent ones.
        """
        sent = self._parts(parts)
        outs = [empty_like(part) for part in sent] if out is None else self._parts(out)
        sources, targets = (
            [self._queue.source(part) for part in sent],
            [self._queue.target(p) for p in outs],
        )
        return self._call("all_to_all", sources, targets, outs, async_op)

    def barrier(self, *, async_op: bool = False) -> None | Work[None]:
        """Wait until every rank has called this."""
        if async_op:
            return self._call("barrier", [], [], None, async_op)
        self.blocking_barrier()
        return None

    # -- point to point -----------------------------------------------------------------------

    def send(
        self, tensor: Tensor, to: int, *, tag: int = 0, async_op: bool = False
    ) -> None | Work[None]:
        """Send a tensor to one rank, which receives it with the same tag."""
        self._check_peer(to, tag, "send")
        source = self._queue.source(tensor)
        arguments = (to, tag, source.address, source.count, source.dtype, async_op)
        handle = self._queue.start(partial(self._core.start_send, *arguments), [source])
        self.keep_alive(handle, source)
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
        """Receive a tensor from one rank, or from any if `source` is None; return the sender.

        Progress in the background costs wake-ups. Pass `background=False` for an asynchronous
        receive that the caller is going to wait for anyway.
        """
        self._check_peer(source, tag, "recv")
        target = self._queue.target(tensor)
        member = -1 if source is None else source
        handle = self.engine_group().start_receive(
            member, tag, target.address, target.count, target.dtype, async_op and background
        )

        def finish() -> int:
            target.write_back()
            return handle.source()

        self.keep_alive(handle, target)
        work = Work(handle, finish, target)
        return work if async_op else work.wait()

    # -- membership ---------------------------------------------------------------------------

    def reconfigure(self, membership: Membership) -> None:
        """Form the group again from those of its members that are in the given membership.

        Operations in flight end with GenerationChanged. Every remaining member must call this with
        the same membership, and its generation must be higher than the group's.
        """
        if membership.generation <= self.generation:
            raise UsageError(
                f"reconfigure to generation {membership.generation}, but the group is at"
                f" {self.generation}: pass a membership with a higher generation"
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
        self._set_members(staying, membership.generation)
        self._core = self._make_core(membership)

    def close(self) -> None:
        """Release the group's resources; operations in flight end with GenerationChanged."""
        self._core.close()

    # -- calls into the engine ----------------------------------------------------------------

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
        buffers = (*sources, *targets)
        dtype, shape = common_dtype(kind, buffers) if buffers else (0, ())  # a barrier has none
        inputs, outputs = [b.part for b in sources], [b.part for b in targets]
        arguments = (KINDS[kind], dtype, op, root, inputs, outputs, shape)
        if async_op:
            handle = self._queue.start(partial(self._core.start, *arguments), sources)
            return self._track(handle, sources, targets, result)
        for source in sources:
            source.arrive()
        self.engine_group().run(*arguments)
        for target in targets:
            target.write_back()
        return result

    def _track(
        self,
        handle: Handle,
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        result: Result,
    ) -> Work[Result]:
        def finish() -> Result:
            for target in targets:
                target.write_back()
            return result

        self.keep_alive(handle, (sources, targets))
        return Work(handle, finish, (sources, targets))

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
