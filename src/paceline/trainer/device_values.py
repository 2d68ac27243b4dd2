"""Batches and values of a Trainer whose model is on a device.

Loaders make batches in host memory: the Trainer copies each one to the device of the model. Losses
and metrics are numbers on the device that are not needed at once. They are copied to pinned memory
and read when they have arrived, in their order, so that no batch waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.device_route import Copied, DeviceRoute
from paceline.comm.devices import devices_of, is_on_device, pinned_like


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device that holds all of these parameters; None on the CPU, and if only some of
    them are on a device (`placement="mixed"`): there the model itself moves what it needs."""
    known = list(tensors)
    found = devices_of(known)
    return found[0] if len(found) == 1 and all(map(is_on_device, known)) else None


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; from pinned memory without a wait."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {name: moved(part, device) for name, part in batch.items()}
    return batch


class LateNumbers:
    """Numbers on their way from a device to the host. They arrive in the order of `send`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._route = device, DeviceRoute(device)
        self._sent: deque[tuple[Copied, list[torch.Tensor], Any]] = deque()

    def send(self, tensors: Sequence[torch.Tensor], label: Any) -> None:
        """Start to copy some tensors of one number each; `label` comes back with them."""
        pairs = [(tensor.detach(), self._host_memory(tensor)) for tensor in tensors]
        copied = self._route.to_host_together(pairs)
        self._sent.append((copied, [host for _, host in pairs], label))

    def arrived(self, *, everything: bool = False) -> Iterator[tuple[list[float], Any]]:
        """Yield what has arrived, with its labels. With `everything`, wait for all that was
        sent."""
        while self._sent:
            copied, hosts, label = self._sent[0]
            if not copied.done():
                if not everything:
                    return
                copied.wait_on_host()
            self._sent.popleft()
            yield [float(host) for host in hosts], label

    def _host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        host = pinned_like(tensor, self._device)
        return torch.empty(tensor.shape, dtype=tensor.dtype) if host is None else host
