"""torch.distributed on our engine: the process group behind `init_process_group("paceline")`.

    dist.all_reduce(t)  ->  PacelineProcessGroup.allreduce([t], options)  ->  _core.Group
    DDP, functional collectives (C++)  ->  torch's trampoline  ->  the same methods

torch's names and argument lists are kept; each method turns its tensors into addresses and makes
one call into the engine. When torch wants no Work (`options.asyncOp` is false) the call blocks in
the engine and hands out a finished one. Threads: any; collectives run in the order of the calls.

Not here: how groups meet (torch_rendezvous.py), what else torch asks of a group (torch_group.py),
works and futures (torch_work.py), collectives made of several (torch_compound.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from paceline.collectives.torch_arguments import (
    bytes_of,
    cut_rows,
    listed,
    numbers_of,
    op_code,
    with_op,
    with_root,
)
from paceline.collectives.torch_compound import monitored_barrier, sparse_all_reduce
from paceline.collectives.torch_group import DONE, EngineProcessGroup, is_profiled, opened
from paceline.collectives.torch_work import DoneWork, TorchWork
from paceline.errors import UnsupportedTensor


class PacelineProcessGroup(EngineProcessGroup):
    """A group of ranks as torch.distributed sees it; made by `create_group`."""

    # -- reductions ---------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None, **_: Any) -> c10d.Work:
        tensors, opts = listed(tensors), with_op(opts, op, c10d.AllreduceOptions)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = tensors[0]
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, opts)
        buffer = numbers_of(tensor)
        code = op_code(opts.reduceOp, buffer.dtype)
        self._sequence += 1
        address, count = buffer.address, buffer.count
        if not opts.asyncOp and not is_profiled():
            self._core.all_reduce(address, address, count, buffer.dtype, code, buffer.shape)
            buffer.write_back()
            return DONE
        record = opened("all_reduce", tensors)
        handle = self._core.start_all_reduce(
            address, address, count, buffer.dtype, code, buffer.shape
        )
        return self._track(TorchWork((handle,), (buffer,), tensors), record, opts.asyncOp)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> c10d.Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        single = c10d.AllreduceOptions()
        single.reduceOp = opts.reduceOp
        return self._together([self.allreduce([tensor], single) for tensor in tensors], opts)

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> c10d.Work:
        if opts.reduceOp != ReduceOp.SUM:
            raise UnsupportedTensor(
                f"all_reduce of a sparse tensor with {opts.reduceOp.op}: only SUM"
            )
        record = opened("sparse_all_reduce", [tensor])
        try:
            return DoneWork([sparse_all_reduce(self, tensor)])
        finally:
            if record is not None:
                record.__exit__(None, None, None)

    def reduce(self, tensors: Any, opts: Any = None, **named: Any) -> c10d.Work:
        tensors, opts = listed(tensors), with_root(opts, named, c10d.ReduceOptions)
        if "op" in named:
            opts.reduceOp = named["op"]
        buffer = numbers_of(tensors[0])
        outputs = [buffer] if self.rank() == opts.rootRank else []
        code = op_code(opts.reduceOp, buffer.dtype)
        return self._run("reduce", [buffer], outputs, tensors, tensors, opts, code, opts.rootRank)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *, op: Any = None, **_: Any
    ) -> c10d.Work:
        outputs, opts = listed(outputs), with_op(opts, op, c10d.ReduceScatterOptions)
        parts = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        self._check_parts(parts, "reduce_scatter")
        sources, target = [numbers_of(part) for part in parts], numbers_of(outputs[0])
        code = op_code(opts.reduceOp, target.dtype)
        return self._run("reduce_scatter", sources, [target], outputs, list(parts), opts, code)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        opts = opts or c10d.ReduceScatterOptions()
        source, target = numbers_of(input), numbers_of(output)
        code = op_code(opts.reduceOp, target.dtype)
        self._check_multiple(source, target, "reduce_scatter_tensor", input, output)
        return self._run(
            "reduce_scatter", [source], [target], [output], [input], opts, code,
            cut_inputs=True, title="_reduce_scatter_base",
        )  # fmt: skip

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        opts = opts or c10d.ReduceScatterOptions()
        single = c10d.ReduceScatterOptions()
        single.reduceOp = opts.reduceOp
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.reduce_scatter_single(o, i, single) for o, i in pairs], opts)

    # -- moving -------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> c10d.Work:
        tensors, opts = listed(tensors), with_root(opts, named, c10d.BroadcastOptions)
        buffer, root = bytes_of(tensors[0]), opts.rootRank
        is_root = self.rank() == root
        sources, targets = ([buffer], []) if is_root else ([], [buffer])
        return self._run("broadcast", sources, targets, tensors, tensors, opts, root=root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> c10d.Work:
        opts, inputs = opts or c10d.AllgatherOptions(), listed(inputs)
        if len(inputs) != 1:
            return self.allgather_coalesced(outputs, inputs, opts)
        parts = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        self._check_parts(parts, "all_gather")
        targets = [bytes_of(part) for part in parts]
        source = [bytes_of(inputs[0])]
        return self._run("all_gather", source, targets, list(parts), inputs, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        opts = opts or c10d.AllgatherOptions()
        # torch gives a list of tensors for each rank; the engine wants one of ranks per tensor.
        self._check_parts(output_lists, "all_gather_coalesced")
        output_lists = [list(ranks) for ranks in zip(*output_lists, strict=True)]
        pairs = zip(output_lists, input_list, strict=True)
        single = c10d.AllgatherOptions()
        return self._together([self.allgather([o], [i], single) for o, i in pairs], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        opts = opts or c10d.AllgatherOptions()
        source, target = bytes_of(input), bytes_of(output)
        self._check_multiple(target, source, "all_gather_into_tensor", output, input)
        return self._run(
            "all_gather", [source], [target], [output], [input], opts,
            cut_outputs=True, title="_all_gather_base",
        )  # fmt: skip

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        opts = opts or c10d.AllgatherOptions()
        pairs, single = zip(outputs, inputs, strict=True), c10d.AllgatherOptions()
        return self._together([self.all_gather_single(o, i, single) for o, i in pairs], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> c10d.Work:
        inputs, opts = listed(inputs), with_root(opts, named, c10d.GatherOptions)
        parts: list[Tensor] = []
        if self.rank() == opts.rootRank:
            parts = list(outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs)
            self._check_parts(parts, "gather")
        source, targets = [bytes_of(inputs[0])], [bytes_of(part) for part in parts]
        return self._run("gather", source, targets, parts, inputs, opts, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> c10d.Work:
        outputs, opts = listed(outputs), with_root(opts, named, c10d.ScatterOptions)
        parts: list[Tensor] = []
        if self.rank() == opts.rootRank:
            parts = list(inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs)
            self._check_parts(parts, "scatter")
        sources, target = [bytes_of(part) for part in parts], [bytes_of(outputs[0])]
        return self._run("scatter", sources, target, outputs, parts, opts, root=opts.rootRank)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> c10d.Work:
        opts = opts or c10d.AllToAllOptions()
        self._check_parts(inputs, "all_to_all")
        self._check_parts(outputs, "all_to_all")
        sources, targets = [bytes_of(part) for part in inputs], [bytes_of(part) for part in outputs]
        return self._run("all_to_all", sources, targets, outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        **_: Any,
    ) -> c10d.Work:
        opts = opts or c10d.AllToAllOptions()
        source, target = bytes_of(input), bytes_of(output)
        given = cut_rows(source, input, input_splits, self._members)
        taken = cut_rows(target, output, output_splits, self._members)
        return self._start(
            "all_to_all", source, given, taken, [target], [output], [input], opts, keep=source
        )

    def barrier(self, opts: Any = None, **_: Any) -> c10d.Work:
        opts = opts or c10d.BarrierOptions()
        limit: timedelta = opts.timeout
        if opts.asyncOp or limit < timedelta(0):
            return self._start("barrier", None, [], [], [], [], [], opts)
        opts.asyncOp = True
        work = self._start("barrier", None, [], [], [], [], [], opts)
        work.wait(limit)
        return work

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks and name those that do not come."""
        self._barriers += 1
        monitored_barrier(self._group, self._barriers, timeout, wait_all_ranks)

    # -- point to point -----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> c10d.Work:
        buffer, record = bytes_of(tensors[0]), opened("send", tensors)
        handle = self._core.start_send(dst, tag, buffer.address, buffer.count, buffer.dtype)
        return self._track(TorchWork((handle,), (), tensors, buffer), record, True)

    def recv(self, tensors: list[Tensor], src: int, tag: int, title: str = "recv") -> c10d.Work:
        buffer, record = bytes_of(tensors[0]), opened(title, tensors)
        handle = self._core.start_receive(src, tag, buffer.address, buffer.count, buffer.dtype)
        return self._track(TorchWork((handle,), (buffer,), tensors), record, True)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> c10d.Work:
        return self.recv(tensors, -1, tag, "recvAnySource")

    # Older names of the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
