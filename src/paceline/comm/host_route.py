"""Engine memory that a device reaches, and the trips between them.

Engine memory is registered with the device as pinned where its runtime allows that: the device then
copies straight into memory that other processes of the host read, and nothing is copied twice.
Elsewhere a copy is staged through pinned memory, one block for each direction. If there is no
pinned memory either, a copy makes the errand thread wait, never the script.

    send     device -> engine memory, then an action on an errand thread (start an exchange)
    bring    after the exchange: engine memory -> device; the script's stream waits for the copy

Errands of each direction run in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from paceline.comm.device_route import (
    Copied,
    DeviceRoute,
    Errand,
    ErrandThread,
    mark,
    naming_errors,
)
from paceline.comm.devices import Pin, is_on_device, pinned_bytes, register_pinned
from paceline.comm.group import Group
from paceline.runtime.console import say, warn
from paceline.runtime.work import Handle

Result = TypeVar("Result")
Allocate = Callable[[int, torch.dtype], torch.Tensor]


class HostRoute:
    """Trips between one device and engine memory."""

    def __init__(self, device: torch.device, allocate: Allocate, *, who: str = "") -> None:
        """`allocate` returns engine memory on pages of its own; `who`: this process, for errors."""
        self.device, self._who = device, who
        self._allocate = allocate
        self._route = DeviceRoute(device)
        self._out, self._in = ErrandThread("out", device), ErrandThread("in", device)
        self._pins: dict[int, Pin] = {}  # by address
        self._stages: dict[str, torch.Tensor] = {}  # by direction
        self._stage_bytes = 0  # of the largest memory that could not be registered

    @property
    def copied_ms(self) -> float:
        """Time that the device has copied, to the host and back."""
        return self._route.copied_ms

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new engine memory, registered with the device if possible; kept until `close`."""
        host = self._allocate(count, dtype)
        pin = register_pinned(host, self.device)
        if pin is not None:
            self._pins[host.data_ptr()] = pin
        elif count:
            if not self.is_staged:
                warn(
                    f"{self._who}: host memory cannot be registered with {self.device} here: each"
                    " copy goes through a block of pinned memory"
                )
            self._stage_bytes = max(self._stage_bytes, host.numel() * host.element_size())
        return host

    @property
    def is_staged(self) -> bool:
        """Whether some memory could not be registered."""
        return self._stage_bytes > 0

    def send(
        self, source: torch.Tensor, host: torch.Tensor, then: Callable[[], Result]
    ) -> Errand[Result]:
        """Copy to engine memory what this thread's stream has written; call `then` afterwards."""
        if host.data_ptr() in self._pins:
            with naming_errors(self._who, self.device):
                copied = self._route.to_host(source, host)

            def wait() -> None:
                copied.wait_on_host()
        else:
            written = mark(self.device)

            def wait() -> None:
                stage = self._stage("out", host)
                self._route.to_host(source, stage, written).wait_on_host()
                if stage is not host:
                    host.copy_(stage)

        def errand() -> Result:
            with naming_errors(self._who, self.device):
                wait()
            return then()

        return self._out.submit(errand)

    def bring(
        self, exchange: Errand[Handle], host: torch.Tensor, target: torch.Tensor
    ) -> Errand[Copied]:
        """Copy a result to the device when the exchange that `send` started has ended.

        The copy runs after what this thread's stream has launched until now, which may use the
        target. To read the target, wait for the errand, then `wait_on_stream`.
        """
        unused = mark(self.device)

        def errand() -> Copied:
            exchange.wait().wait()
            with naming_errors(self._who, self.device):
                return self._launch(host, target, unused)

        return self._in.submit(errand)

    def _launch(self, host: torch.Tensor, target: torch.Tensor, unused: torch.Event) -> Copied:
        if host.data_ptr() in self._pins:
            return self._route.to_device(host, target, unused)
        stage = self._stage("in", host)
        if stage is not host:
            stage.copy_(host)
        copied = self._route.to_device(stage, target, unused)
        copied.wait_on_host()  # the stage is used again
        return copied

    def wait_for(self, copied: Copied) -> None:
        """Wait until a copy is complete: for the errand that waits for the device."""
        self._out.submit(copied.wait_on_host).wait()

    def _stage(self, way: str, host: torch.Tensor) -> torch.Tensor:
        """Return pinned memory of the size of `host`; without pinned memory `host` itself."""
        needed = host.numel() * host.element_size()
        stage = self._stages.get(way)
        if stage is None or stage.numel() < needed:
            stage = None
            self._stages.pop(way, None)  # before the larger one: two blocks are all there ever is
            made = pinned_bytes(max(needed, self._stage_bytes))
            if made is None:
                _warn_of_no_pinning(self.device)
                return host
            stage = self._stages[way] = made
        return stage[:needed].view(host.dtype).view(host.shape)

    def close(self) -> None:
        """Wait for all trips, end the threads and give the memory back. May be called twice."""
        self._out.close()
        self._in.close()
        self._route.settle()
        for pin in self._pins.values():
            pin.close()
        self._pins.clear()
        self._stages.clear()


def broadcast_first(group: Group, tensor: torch.Tensor) -> None:
    """Copy the first worker's tensor to all, wherever it is. Collective; blocks, for setting up."""
    if not is_on_device(tensor):
        group.broadcast(tensor)
        return
    host = tensor.cpu()
    group.broadcast(host)
    if group.rank:
        tensor.copy_(host)


@cache
def _warn_of_no_pinning(device: torch.device) -> None:
    say(
        f"{device}: this machine cannot pin host memory (see ulimit -l), so copies to and from the"
        " device do not overlap with its computations"
    )


class Arrival:
    """A result on its way to the device; a Handle (runtime/work.py)."""

    def __init__(self, brought: Errand[Copied]) -> None:
        self._brought = brought

    def done(self) -> bool:
        """Return whether the exchange has ended and the copy was launched."""
        return self._brought.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the exchange; let the current stream wait for the copy."""
        self._brought.wait(timeout_s).wait_on_stream()

    def error(self) -> Exception | None:
        return self._brought.error()
