"""Buffers on a device, synchronised there or through host memory, without waiting for the device.

As on the CPU all of them lie in one block, here in the memory of the device, and the model's
tensors are views of it. Forward writes them, on the script's stream; the exchange runs after that,
beside the optimizer's kernels; the script's stream waits for it at the end of the step.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.comm.device_group import DeviceGroup
from paceline.comm.devices import is_on_device
from paceline.comm.group import Group
from paceline.comm.host_route import Arrival, HostRoute, broadcast_first
from paceline.data_parallel.model_state.buffers import MEANS, Buffers
from paceline.data_parallel.setup import TrainingSetup


class Way(Protocol):
    """How memory of a device is exchanged. `wait()` of a result lets the current stream wait."""

    def broadcast(self, memory: Tensor) -> Any: ...
    def mean(self, memory: Tensor) -> Any: ...


class OnDevice:
    """By the device's own backend."""

    def __init__(self, collectives: DeviceGroup) -> None:
        self._collectives = collectives

    def broadcast(self, memory: Tensor) -> Any:
        return self._collectives.broadcast(memory)

    def mean(self, memory: Tensor) -> Any:
        return _Mean(self._collectives.all_reduce(memory), memory, self._collectives.size)


class _Mean:
    """A sum on its way, divided when its wait ends."""

    def __init__(self, work: Any, memory: Tensor, size: int) -> None:
        self._work, self._memory, self._size = work, memory, size

    def wait(self) -> None:
        self._work.wait()
        self._memory.div_(self._size)


class ThroughHost:
    """By the engine, in host memory."""

    def __init__(self, route: HostRoute, group: Group) -> None:
        self._route, self._group = route, group
        self._hosts: dict[int, Tensor] = {}  # by the address of the memory on the device

    def broadcast(self, memory: Tensor) -> Any:
        host = self._host_of(memory)
        sent = self._route.send(memory, host, lambda: self._group.broadcast(host, async_op=True))
        return Arrival(self._route.bring(sent, host, memory))  # type: ignore[arg-type]

    def mean(self, memory: Tensor) -> Any:
        host = self._host_of(memory)
        sent = self._route.send(
            memory, host, lambda: self._group.all_reduce(host, "mean", async_op=True)
        )
        return Arrival(self._route.bring(sent, host, memory))  # type: ignore[arg-type]

    def _host_of(self, memory: Tensor) -> Tensor:
        host = self._hosts.get(memory.data_ptr())
        if host is None or host.numel() != memory.numel() or host.dtype != memory.dtype:
            host = self._route.allocate(memory.numel(), memory.dtype)
            self._hosts[memory.data_ptr()] = host
        return host


class DeviceBuffers(Buffers):
    """The buffers of one model that are on a device."""

    def __init__(
        self,
        model: nn.Module,
        setup: TrainingSetup,
        device: torch.device,
        way: Way,
        *,
        survives_loss: bool,
    ) -> None:
        group, engine = setup.form("first buffers of the device"), setup.job.fabric.engine
        super().__init__(model, group, engine, setup.buffers_mode, survives_loss=survives_loss)
        self._device, self._way = device, way

    def broadcast_now(self) -> None:
        self._copy_in()
        if self._memory.numel():
            broadcast_first(self._group, self._memory)
        self._copy_back()

    def _is_mine(self, buffer: Tensor) -> bool:
        return is_on_device(buffer)

    def _exchange(self) -> None:
        if self._policy == "broadcast":
            self._under_way = [self._way.broadcast(self._memory)]
            return
        for dtype, section in self._sections.items():
            # A view, because backends tell the allocator of a tensor's storage that they use it.
            start = section.data_ptr() - self._memory.data_ptr()
            memory = self._memory[start : start + section.numel()]
            if dtype in MEANS:
                self._under_way.append(self._way.mean(memory.view(MEANS[dtype])))
            else:
                self._under_way.append(self._way.broadcast(memory))

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class SeveralBuffers:
    """Buffers in several places, as one."""

    def __init__(self, *parts: Buffers) -> None:
        self._parts = parts

    @property
    def num_placed(self) -> int:
        return sum(part.num_placed for part in self._parts)

    def broadcast_now(self) -> None:
        for part in self._parts:
            part.broadcast_now()

    def synchronise(self) -> None:
        for part in self._parts:
            part.synchronise()

    @property
    def agreed(self) -> Tensor:
        """The last values that all agreed on, of all parts, in host memory."""
        return torch.cat([part.agreed.cpu() for part in self._parts])

    def load_agreed(self, agreed: Tensor) -> None:
        start = 0
        for part in self._parts[:-1]:
            part.load_agreed(agreed[start : start + part.num_bytes])
            start += part.num_bytes
        self._parts[-1].load_agreed(agreed[start:])

    def start(self) -> None:
        for part in self._parts:
            part.start()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()


def make_buffers(setup: TrainingSetup, model: nn.Module, *, survives_loss: bool) -> Any:
    """Return what synchronises the buffers of a model, wherever they are. Collective."""
    engine, mode, group = setup.job.fabric.engine, setup.buffers_mode, setup.form("buffers")
    on_host = Buffers(model, group, engine, mode, survives_loss=survives_loss)
    there = setup.on_device
    if there is None:
        return on_host
    way: Way = (
        OnDevice(there.collectives)
        if there.collectives is not None
        else ThroughHost(there.route, setup.form("buffers of the device"))
    )
    on_device = DeviceBuffers(model, setup, there.device, way, survives_loss=survives_loss)
    return SeveralBuffers(on_host, on_device)
