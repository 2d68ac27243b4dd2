"""The collective backend "lagcomm": what NCCL is for CUDA, as late as everything on this device.

A collective runs on a stream of its own: copy to the host, wait for a gate, copy back. A thread of
the backend waits for the first copy, lets gloo do the exchange, and opens the gate. As with NCCL,
the call returns at once and `Work.wait` lets the current stream wait, not the host.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from laggard import _C
from laggard.simulation import spend_exchange

NAME = "lagcomm"
Exchange = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


class StreamWork(dist._Work):
    """A collective on its way: `wait` orders the current stream after it."""

    def __init__(
        self, done: torch.Event, result: Any, device: torch.device, errors: list[Exception]
    ) -> None:
        super().__init__()
        self._done, self._device, self._errors = done, device, errors
        # With its device, so that callbacks of the future run in the right order on streams.
        self._future: Future[Any] = Future(devices=[device])
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise_first(self._errors)
        torch.accelerator.current_stream(self._device).wait_event(self._done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.query()

    def get_future(self) -> Future[Any]:
        return self._future


def raise_first(errors: list[Exception]) -> None:
    if errors:
        raise RuntimeError(f"{NAME}: an earlier collective failed: {errors[0]}") from errors[0]


def staging_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return pinned memory that stays open: a gate orders accesses to it, not a host wait."""
    size = tensor.numel() * tensor.element_size()
    return _C.staging_memory(size).view(tensor.dtype).view(tensor.shape)


class LaggardGroup(dist.ProcessGroup):
    """Collectives on device tensors; tensors of the CPU go to gloo.

    Callers in C++ do not reach `reduce`, `gather` and `scatter` in torch 2.13: a process group in
    Python cannot override them there. `torch.distributed` itself does reach them.
    Threads: one, which exchanges in the order of the calls.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # Two groups: gloo matches calls by their order. Calls of the thread and calls of the
        # program for tensors of the CPU come in another order on each rank.
        self._gloo, self._host_gloo = (
            dist.ProcessGroupGloo(dist.PrefixStore(f"{NAME}/{name}", store), rank, size, timeout)
            for name in ("device", "host")
        )
        self._errors: list[
            Exception
        ] = []  # as with NCCL: raised by a later call, the group is lost
        self._name = self._description = ""
        self._streams: dict[torch.device, torch.Stream] = {}
        self._last: dict[torch.device, torch.Event] = {}  # ends of the newest collectives
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=NAME, daemon=True)
        self._thread.start()

    # torch keeps names in its C++ backends, and this group has none.
    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    supports_splitting = supports_coalescing = supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("laggard")]

    def _get_backend(self, device: torch.device) -> LaggardGroup:
        return self

    def _serve(self) -> None:
        _C.set_counted(False)  # this thread plays the network card
        while (job := self._jobs.get()) is not None:
            job()

    def shutdown(self) -> None:
        """End the group. RuntimeError under a collective: other backends hang or abort there."""
        if not all(done.query() for done in self._last.values()):
            raise RuntimeError(f"{NAME}: shut down while a collective is in flight")
        self._jobs.put(None)
        # While Python ends, a thread that frees the groups of gloo would abort the process.
        self._thread.join()

    def _run(
        self,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        exchange: Exchange,
        result: Any,
    ) -> StreamWork:
        raise_first(self._errors)
        device = (inputs or outputs)[0].device
        stream = self._streams.setdefault(device, torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        ready, done, gate = torch.Event(device), torch.Event(device), _C.Gate()
        sent = [staging_like(tensor) for tensor in inputs]
        received = sent if inputs is outputs else [staging_like(tensor) for tensor in outputs]

        size = sum(t.numel() * t.element_size() for t in (inputs or outputs))

        def job() -> None:
            try:
                ready.synchronize()
                exchange(sent, received)
                spend_exchange(size)
            except Exception as error:
                self._errors.append(error)
            gate.set()  # also after an error: a stream that waits for ever would hang the process

        with stream:
            for host, tensor in zip(sent, inputs, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            ready.record(stream)
            self._jobs.put(job)
            _C.stream_wait_gate(stream.device_index, stream.stream_id, gate)
            for host, tensor in zip(received, outputs, strict=True):
                tensor.copy_(host, non_blocking=True)
                tensor.record_stream(stream)
            done.record(stream)
            self._last[device] = done
            return StreamWork(done, result, device, self._errors)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_cpu:
            return self._host_gloo.allreduce(tensors, opts)

        def exchange(_: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            for tensor in received:
                self._gloo.allreduce([tensor], opts).wait()

        return self._run(tensors, tensors, exchange, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp = opts.reduceOp
        return self.allreduce(tensors, plain)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if tensors[0].is_cpu:
            return self._host_gloo.broadcast(tensors, opts)

        def exchange(_: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.broadcast(received, opts).wait()

        return self._run(tensors, tensors, exchange, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        if inputs[0].is_cpu:
            return self._host_gloo.allgather(outputs, inputs)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.allgather([received], sent).wait()

        return self._run(inputs, outputs[0], exchange, outputs)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        if tensor.is_cpu:
            return self._host_gloo._allgather_base(output, tensor)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo._allgather_base(received[0], sent[0]).wait()

        return self._run([tensor], [output], exchange, output)

    _allgather_base = all_gather_single  # as backends call it

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if tensor.is_cpu:
            return self._host_gloo._reduce_scatter_base(output, tensor, opts)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo._reduce_scatter_base(received[0], sent[0], opts).wait()

        return self._run([tensor], [output], exchange, output)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if outputs[0].is_cpu:
            return self._host_gloo.reduce_scatter(outputs, inputs, opts)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.reduce_scatter(received, [sent], opts).wait()

        return self._run(inputs[0], outputs, exchange, outputs)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        if inputs[0].is_cpu:
            return self._host_gloo.allgather_into_tensor_coalesced(outputs, inputs)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            for whole, part in zip(received, sent, strict=True):
                self._gloo._allgather_base(whole, part).wait()

        return self._run(inputs, outputs, exchange, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if inputs[0].is_cpu:
            return self._host_gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            for part, whole in zip(received, sent, strict=True):
                self._gloo._reduce_scatter_base(part, whole, opts).wait()

        return self._run(inputs, outputs, exchange, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        if tensor.is_cpu:
            return self._host_gloo.alltoall_base(output, tensor, output_sizes, input_sizes)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.alltoall_base(received[0], sent[0], output_sizes, input_sizes).wait()

        return self._run([tensor], [output], exchange, output)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if tensors[0].is_cpu:
            return self._host_gloo.reduce(tensors, opts)

        def exchange(_: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.reduce(received, opts).wait()

        return self._run(tensors, tensors, exchange, tensors)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Any:
        if inputs[0].is_cpu:
            return self._host_gloo.gather(outputs, inputs, opts)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.gather([received] if outputs else [], sent, opts).wait()

        return self._run(inputs, outputs[0] if outputs else [], exchange, outputs)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> Any:
        if outputs[0].is_cpu:
            return self._host_gloo.scatter(outputs, inputs, opts)

        def exchange(sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.scatter(received, [sent] if inputs else [], opts).wait()

        return self._run(inputs[0] if inputs else [], outputs, exchange, outputs)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if tensors[0].is_cpu:
            return self._host_gloo.send(tensors, dst, tag)

        def exchange(sent: list[torch.Tensor], _: list[torch.Tensor]) -> None:
            self._gloo.send(sent, dst, tag).wait()

        return self._run(tensors, [], exchange, tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        if tensors[0].is_cpu:
            return self._host_gloo.recv(tensors, src, tag)

        def exchange(_: list[torch.Tensor], received: list[torch.Tensor]) -> None:
            self._gloo.recv(received, src, tag).wait()

        return self._run([], tensors, exchange, tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.zeros(1, device=torch.accelerator.current_accelerator())])


def register() -> None:
    """Make "lagcomm" the default backend for tensors of the device."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LaggardGroup:
        return LaggardGroup(store, rank, size, timeout)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, devices=["laggard"])
