"""torch.distributed on Paceline's engine: the process group of `init_process_group("paceline")`.

    dist.all_reduce(t)  ->  PacelineProcessGroup.allreduce([t], options)  ->  _core.Group
    DDP, functional collectives (C++)  ->  torch's trampoline  ->  the same methods

Methods have torch's names and arguments. Each one converts its tensors to addresses and makes one
call into the engine. If torch needs no Work (`options.asyncOp` is false), the call blocks in the
engine and returns a finished Work. Methods may be called from any thread; collectives run in the
order of the calls.

Elsewhere: forming the default group (runtime/torch_init.py), the rest of torch's interface of a
group (process_group.py), works and futures (work.py), collectives that need several operations
(composite.py).
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
    CollectiveCall,
    as_list,
    collective_call,
    known_op,
    numeric_buffer,
    op_code,
    options_with_op,
    options_with_root,
    raw_buffer,
    split_buffer,
    split_like,
)
from paceline.comm.torch.composite import monitored_barrier, sparse_all_reduce
from paceline.comm.torch.process_group import (
    DONE,
    EngineProcessGroup,
    is_profiled,
    start_profiler_event,
)
from paceline.comm.torch.work import DoneWork, TorchWork
from paceline.errors import UnsupportedTensor


class PacelineProcessGroup(EngineProcessGroup):
    """A torch.distributed process group on the engine."""

    # -- reductions ---------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None, **_: Any) -> c10d.Work:
        tensors, opts = as_list(tensors), options_with_op(opts, op, c10d.AllreduceOptions)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = tensors[0]
        is_waited_for = not opts.asyncOp and not is_profiled()
        if is_waited_for:  # the most frequent call takes a short path
            code = known_op(opts.reduceOp)
            with self.waiting:
                if code is not None and self._core.all_reduce_tensor(tensor, code):
                    self._sequence += 1
                    return DONE
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, opts)
        buffer = numeric_buffer(tensor)
        code = op_code(opts.reduceOp, buffer.dtype)
        self._sequence += 1
        address, count = buffer.address, buffer.count
        if is_waited_for:
            with self.waiting:
                self._core.all_reduce(address, address, count, buffer.dtype, code, buffer.shape)
            buffer.write_back()
            return DONE
        event = start_profiler_event("all_reduce", tensors)
        handle = self._core.start_all_reduce(
            address, address, count, buffer.dtype, code, buffer.shape
        )
        return self._track(TorchWork((handle,), (buffer,), tensors), event, opts.asyncOp)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> c10d.Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        calls = []
        for tensor in tensors:
            memory = [numeric_buffer(tensor)]
            code = op_code(opts.reduceOp, memory[0].dtype)
            calls.append(collective_call("all_reduce", memory, memory, [tensor], op=code))
        return self._submit("all_reduce", calls, tensors, opts)

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> c10d.Work:
        if opts.reduceOp != ReduceOp.SUM:
            raise UnsupportedTensor(
                f"all_reduce of a sparse tensor with {opts.reduceOp}: only SUM is supported; call"
                " .to_dense() first"
            )
        event = start_profiler_event("sparse_all_reduce", [tensor])
        try:
            return DoneWork([sparse_all_reduce(self, tensor)])
        finally:
            if event is not None:
                event.end()

    def reduce(self, tensors: Any, opts: Any = None, **named: Any) -> c10d.Work:
        tensors, opts = as_list(tensors), options_with_root(opts, named, c10d.ReduceOptions)
        if "op" in named:
            opts.reduceOp = named["op"]
        memory, root = [numeric_buffer(tensors[0])], opts.rootRank
        targets = memory if self.rank() == root else []
        code = op_code(opts.reduceOp, memory[0].dtype)
        call = collective_call("reduce", memory, targets, tensors, op=code, root=root)
        return self._submit("reduce", [call], tensors, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *, op: Any = None, **_: Any
    ) -> c10d.Work:
        outputs, opts = as_list(outputs), options_with_op(opts, op, c10d.ReduceScatterOptions)
        parts = self._parts(inputs, "reduce_scatter")
        target = numeric_buffer(outputs[0])
        code, sources = (
            op_code(opts.reduceOp, target.dtype),
            [numeric_buffer(part) for part in parts],
        )
        call = collective_call("reduce_scatter", sources, [target], outputs, op=code)
        return self._submit("reduce_scatter", [call], parts, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        opts, calls = opts or c10d.ReduceScatterOptions(), []
        for output, input in zip(outputs, inputs, strict=True):
            source, target = numeric_buffer(input), numeric_buffer(output)
            code = op_code(opts.reduceOp, target.dtype)
            parts = split_like(source, target, self._members, "reduce_scatter_tensor")
            calls.append(
                collective_call(
                    "reduce_scatter", [source], [target], [output], op=code, inputs=parts
                )
            )
        return self._submit("_reduce_scatter_base", calls, inputs, opts)

    # -- moving -------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> c10d.Work:
        tensors, opts = as_list(tensors), options_with_root(opts, named, c10d.BroadcastOptions)
        memory, root = [raw_buffer(tensors[0])], opts.rootRank
        sources, targets = (memory, []) if self.rank() == root else ([], memory)
        call = collective_call("broadcast", sources, targets, tensors, root=root)
        return self._submit("broadcast", [call], tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> c10d.Work:
        opts, inputs = opts or c10d.AllgatherOptions(), as_list(inputs)
        parts = self._parts(outputs, "all_gather")
        call = self._all_gather_call(inputs[0], parts)
        return self._submit("all_gather", [call], inputs, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        """Gather several tensors; torch passes a list of results for each rank."""
        self._check_parts(output_lists, "all_gather_coalesced")
        by_tensor = zip(*output_lists, strict=True)
        pairs = zip(input_list, by_tensor, strict=True)
        calls = [self._all_gather_call(input, list(parts)) for input, parts in pairs]
        return self._submit("all_gather", calls, input_list, opts or c10d.AllgatherOptions())

    def _all_gather_call(self, input: Tensor, parts: list[Tensor]) -> CollectiveCall:
        targets = [raw_buffer(part) for part in parts]
        return collective_call("all_gather", [raw_buffer(input)], targets, parts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> c10d.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> c10d.Work:
        calls = []
        for output, input in zip(outputs, inputs, strict=True):
            source, target = raw_buffer(input), raw_buffer(output)
            parts = split_like(target, source, self._members, "all_gather_into_tensor")
            calls.append(collective_call("all_gather", [source], [target], [output], outputs=parts))
        return self._submit("_all_gather_base", calls, inputs, opts or c10d.AllgatherOptions())

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> c10d.Work:
        inputs, opts = as_list(inputs), options_with_root(opts, named, c10d.GatherOptions)
        root = opts.rootRank
        parts = self._parts(outputs, "gather") if self.rank() == root else []
        targets = [raw_buffer(part) for part in parts]
        call = collective_call("gather", [raw_buffer(inputs[0])], targets, parts, root=root)
        return self._submit("gather", [call], inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> c10d.Work:
        outputs, opts = as_list(outputs), options_with_root(opts, named, c10d.ScatterOptions)
        root = opts.rootRank
        parts = self._parts(inputs, "scatter") if self.rank() == root else []
        sources = [raw_buffer(part) for part in parts]
        call = collective_call("scatter", sources, [raw_buffer(outputs[0])], outputs, root=root)
        return self._submit("scatter", [call], parts, opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, **_: Any
    ) -> c10d.Work:
        self._check_parts(inputs, "all_to_all")
        self._check_parts(outputs, "all_to_all")
        sources, targets = (
            [raw_buffer(part) for part in inputs],
            [raw_buffer(part) for part in outputs],
        )
        call = collective_call("all_to_all", sources, targets, outputs)
        return self._submit("all_to_all", [call], inputs, opts or c10d.AllToAllOptions())

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        **_: Any,
    ) -> c10d.Work:
        source, target = raw_buffer(input), raw_buffer(output)
        call = collective_call(
            "all_to_all",
            [source],
            [target],
            [output],
            inputs=split_buffer(source, input, input_splits, self._members),
            outputs=split_buffer(target, output, output_splits, self._members),
        )
        return self._submit("all_to_all", [call], [input], opts or c10d.AllToAllOptions())

    def barrier(self, opts: Any = None, **_: Any) -> c10d.Work:
        opts = opts or c10d.BarrierOptions()
        limit: timedelta = opts.timeout
        call = collective_call("barrier", [], [], [])
        if opts.asyncOp or limit < timedelta(0):  # no timeout for this call
            return self._submit("barrier", [call], [], opts)
        opts.asyncOp = True
        work = self._submit("barrier", [call], [], opts)
        work.wait(limit)
        return work

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks and name the missing ones."""
        self._barriers += 1
        monitored_barrier(self._group, self._barriers, timeout, wait_all_ranks)

    # -- point to point -----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> c10d.Work:
        buffer, event = raw_buffer(tensors[0]), start_profiler_event("send", tensors)
        handle = self._core.start_send(dst, tag, buffer.address, buffer.count, buffer.dtype)
        return self._track(TorchWork((handle,), (), tensors, buffer), event, True)

    def recv(self, tensors: list[Tensor], src: int, tag: int, title: str = "recv") -> c10d.Work:
        buffer, event = raw_buffer(tensors[0]), start_profiler_event(title, tensors)
        handle = self._core.start_receive(src, tag, buffer.address, buffer.count, buffer.dtype)
        return self._track(TorchWork((handle,), (buffer,), tensors), event, True)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> c10d.Work:
        return self.recv(tensors, -1, tag, "recvAnySource")

    # Older names of the same methods.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
