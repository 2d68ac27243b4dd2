"""torch.distributed on our engine: the process group behind `init_process_group("paceline")`.

    dist.all_reduce(t)  ->  PacelineProcessGroup.allreduce([t], options)  ->  _core.Group
    DDP, functional collectives (C++)  ->  torch's trampoline  ->  the same methods

torch's names and argument lists are kept; each method turns its tensors into addresses and makes
one call into the engine. When torch wants no Work (`options.asyncOp` is false) the call blocks in
the engine and hands out a finished one. Threads: any; collectives run in the order of the calls.

Not here: how groups meet (runtime/torch_init.py), what else torch asks of a group
(process_group.py), works and futures (work.py), collectives made of several (composite.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from paceline.comm.torch.arguments import (
    Request,
    bytes_of,
    cut_rows,
    cut_to,
    listed,
    numbers_of,
    op_code,
    request,
    with_op,
    with_root,
)
from paceline.comm.torch.composite import monitored_barrier, sparse_all_reduce
from paceline.comm.torch.process_group import DONE, EngineProcessGroup, is_profiled, opened
from paceline.comm.torch.work import DoneWork, TorchWork
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
        # The most frequent call has a path of its own, without lists.
        buffer = numbers_of(tensor)
        code = op_code(opts.reduceOp, buffer.dtype)
        self._sequence += 1
        address, count = buffer.address, buffer.count
        if not opts.asyncOp and not is_profiled():
            with self.waiting:
                self._core.all_reduce(address, address, count, buffer.dtype, code, buffer.shape)
            buffer.write_back()
            return DONE
        event = opened("all_reduce", tensors)
        handle = self._core.start_all_reduce(
            address, address, count, buffer.dtype, code, buffer.shape
        )
        return self._track(TorchWork((handle,), (buffer,), tensors), event, opts.asyncOp)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> c10d.Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        requests = []
        for tensor in tensors:
            memory = [numbers_of(tensor)]
            code = op_code(opts.reduceOp, memory[0].dtype)
            requests.append(request("all_reduce", memory, memory, [tensor], op=code))
        return self._submit("all_reduce", requests, tensors, opts)

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> c10d.Work:
        if opts.reduceOp != ReduceOp.SUM:
            raise UnsupportedTensor("all_reduce of a sparse tensor: only SUM is defined")
        event = opened("sparse_all_reduce", [tensor])
        try:
            return DoneWork([sparse_all_reduce(self, tensor)])
        finally:
            if event is not None:
                event.end()

    def reduce(self, tensors: Any, opts: Any = None, **named: Any) -> c10d.Work:
        tensors, opts = listed(tensors), with_root(opts, named, c10d.ReduceOptions)
        if "op" in named:
            opts.reduceOp = named["op"]
        memory, root = [numbers_of(tensors[0])], opts.rootRank
        targets = memory if self.rank() == root else []
        code = op_code(opts.reduceOp, memory[0].dtype)
        asked = request("reduce", memory, targets, tensors, op=code, root=root)
        return self._submit("reduce", [asked], tensors, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *, op: Any = None, **_: Any
    ) -> c10d.Work:
        outputs, opts = listed(outputs), with_op(opts, op, c10d.ReduceScatterOptions)
        parts = self._parts(inputs, "reduce_scatter")
        target = numbers_of(outputs[0])
        code, sources = op_code(opts.reduceOp, target.dtype), [numbers_of(part) for part in parts]
        asked = request("reduce_scatter", sources, [target], outputs, op=code)
        return self._submit("reduce_scatter", [asked], parts, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        opts, requests = opts or c10d.ReduceScatterOptions(), []
        for output, input in zip(outputs, inputs, strict=True):
            source, target = numbers_of(input), numbers_of(output)
            code = op_code(opts.reduceOp, target.dtype)
            parts = cut_to(source, target, self._members, "reduce_scatter_tensor")
            requests.append(
                request("reduce_scatter", [source], [target], [output], op=code, inputs=parts)
            )
        return self._submit("_reduce_scatter_base", requests, inputs, opts)

    # -- moving -------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> c10d.Work:
        tensors, opts = listed(tensors), with_root(opts, named, c10d.BroadcastOptions)
        memory, root = [bytes_of(tensors[0])], opts.rootRank
        sources, targets = (memory, []) if self.rank() == root else ([], memory)
        asked = request("broadcast", sources, targets, tensors, root=root)
        return self._submit("broadcast", [asked], tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> c10d.Work:
        opts, inputs = opts or c10d.AllgatherOptions(), listed(inputs)
        parts = self._parts(outputs, "all_gather")
        asked = self._gathering(inputs[0], parts)
        return self._submit("all_gather", [asked], inputs, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        """Gather several tensors; torch gives a list of results for each rank."""
        self._check_parts(output_lists, "all_gather_coalesced")
        by_tensor = zip(*output_lists, strict=True)
        pairs = zip(input_list, by_tensor, strict=True)
        requests = [self._gathering(input, list(parts)) for input, parts in pairs]
        return self._submit("all_gather", requests, input_list, opts or c10d.AllgatherOptions())

    def _gathering(self, input: Tensor, parts: list[Tensor]) -> Request:
        targets = [bytes_of(part) for part in parts]
        return request("all_gather", [bytes_of(input)], targets, parts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        requests = []
        for output, input in zip(outputs, inputs, strict=True):
            source, target = bytes_of(input), bytes_of(output)
            parts = cut_to(target, source, self._members, "all_gather_into_tensor")
            requests.append(request("all_gather", [source], [target], [output], outputs=parts))
        return self._submit("_all_gather_base", requests, inputs, opts or c10d.AllgatherOptions())

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> c10d.Work:
        inputs, opts = listed(inputs), with_root(opts, named, c10d.GatherOptions)
        root = opts.rootRank
        parts = self._parts(outputs, "gather") if self.rank() == root else []
        targets = [bytes_of(part) for part in parts]
        asked = request("gather", [bytes_of(inputs[0])], targets, parts, root=root)
        return self._submit("gather", [asked], inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> c10d.Work:
        outputs, opts = listed(outputs), with_root(opts, named, c10d.ScatterOptions)
        root = opts.rootRank
        parts = self._parts(inputs, "scatter") if self.rank() == root else []
        sources = [bytes_of(part) for part in parts]
        asked = request("scatter", sources, [bytes_of(outputs[0])], outputs, root=root)
        return self._submit("scatter", [asked], parts, opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, **_: Any
    ) -> c10d.Work:
        self._check_parts(inputs, "all_to_all")
        self._check_parts(outputs, "all_to_all")
        sources, targets = [bytes_of(part) for part in inputs], [bytes_of(part) for part in outputs]
        asked = request("all_to_all", sources, targets, outputs)
        return self._submit("all_to_all", [asked], inputs, opts or c10d.AllToAllOptions())

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        **_: Any,
    ) -> c10d.Work:
        source, target = bytes_of(input), bytes_of(output)
        asked = request(
            "all_to_all",
            [source],
            [target],
            [output],
            inputs=cut_rows(source, input, input_splits, self._members),
            outputs=cut_rows(target, output, output_splits, self._members),
        )
        return self._submit("all_to_all", [asked], [input], opts or c10d.AllToAllOptions())

    def barrier(self, opts: Any = None, **_: Any) -> c10d.Work:
        opts = opts or c10d.BarrierOptions()
        limit: timedelta = opts.timeout
        asked = request("barrier", [], [], [])
        if opts.asyncOp or limit < timedelta(0):  # no limit of its own
            return self._submit("barrier", [asked], [], opts)
        opts.asyncOp = True
        work = self._submit("barrier", [asked], [], opts)
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
        buffer, event = bytes_of(tensors[0]), opened("send", tensors)
        handle = self._core.start_send(dst, tag, buffer.address, buffer.count, buffer.dtype)
        return self._track(TorchWork((handle,), (), tensors, buffer), event, True)

    def recv(self, tensors: list[Tensor], src: int, tag: int, title: str = "recv") -> c10d.Work:
        buffer, event = bytes_of(tensors[0]), opened(title, tensors)
        handle = self._core.start_receive(src, tag, buffer.address, buffer.count, buffer.dtype)
        return self._track(TorchWork((handle,), (buffer,), tensors), event, True)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> c10d.Work:
        return self.recv(tensors, -1, tag, "recvAnySource")

    # Older names of the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
