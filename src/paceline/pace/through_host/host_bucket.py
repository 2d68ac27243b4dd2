"""HostBucket: a bucket on a device, as a pace sees it: with flat tensors in host memory.

`grads` and `averaged` belong to an exchange, which copies them. `params` belongs to a method: it is
fetched from the device when the method first reads it in a step, and sent back if the method has
written to it. So a step in which a method does nothing copies nothing, and a method is the same
code as on the CPU, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.device_route import Copied, Errand
from paceline.comm.host_route import HostRoute
from paceline.compress.codec import Segment
from paceline.pace.exchange import Bucket
from paceline.runtime.work import Handle, Together


class HostBucket:
    """Has the interface of a Bucket (pace/exchange.py). Memory is allocated when it is used."""

    def __init__(self, bucket: Bucket, route: HostRoute) -> None:
        self.index, self.label = bucket.index, bucket.label
        self.on_device = bucket
        self._route = route
        self._sent: dict[str, Copied] = {}  # the last copies to the device, which read the memory
        self._memory: dict[str, torch.Tensor] = {}
        self._version: int | None = None  # of `params` as fetched; None: not fetched in this step

    @property
    def segments(self) -> Sequence[Segment]:
        """The segment of each parameter in the flat tensors, in order."""
        return self.on_device.segments

    @property
    def absent(self) -> Sequence[int]:
        """The numbers, in the bucket, of parameters that have no gradient in this pass."""
        return self.on_device.absent

    def _flat(self, name: str) -> torch.Tensor:
        if name not in self._memory:
            like = self.on_device.params
            self._memory[name] = self._route.allocate(like.numel(), like.dtype)
        return self._memory[name]

    def _send(self, name: str, target: torch.Tensor) -> None:
        """Copy to the device: the current stream waits for the copy, the host for its launch."""
        copied = self._route.bring(_ready(), self._flat(name), target).wait()
        copied.wait_on_stream()
        self._sent[name] = copied

    def _release(self, name: str) -> None:
        """Wait until the device has read memory that is to be overwritten. As a rule it has."""
        copied = self._sent.pop(name, None)
        if copied is not None and not copied.done():
            self._route.wait_for(copied)

    @property
    def size(self) -> int:
        return self.on_device.size

    @property
    def dtype(self) -> torch.dtype:
        return self.on_device.dtype

    # -- gradients ----------------------------------------------------------------------------

    @property
    def grads(self) -> torch.Tensor:
        """This worker's gradients, after `fetch_gradients`."""
        return self._flat("grads")

    @property
    def averaged(self) -> torch.Tensor:
        """Receives the agreed gradients, before `send_averages`."""
        return self._flat("averaged")

    def fetch_gradients(self, source: torch.Tensor | None = None) -> Errand[None]:
        """Start to copy this worker's gradients from the device, or `source` instead of them."""
        source = self.on_device.grads if source is None else source
        return self._route.send(source, self.grads, _nothing)

    def fetch_step(self, step: int) -> Errand[None]:
        """Start to copy what is exchanged in a step; here its gradients."""
        del step
        return self.fetch_gradients()

    def send_averages(self) -> None:
        """Copy the agreed gradients to the device, before what the current stream does next."""
        self._send("averaged", self.on_device.averaged)

    def release_averages(self) -> None:
        """Wait until the device has read the last averages, which may now be overwritten."""
        self._release("averaged")

    # -- parameters ---------------------------------------------------------------------------

    @property
    def params(self) -> torch.Tensor:
        """The parameters: fetched at the first access after `expire`."""
        flat = self._flat("params")
        if self._version is None:
            self._release("params")
            self._route.send(self.on_device.params, flat, _nothing).wait()
            self._version = flat._version
        return flat

    def fetch_params(self) -> torch.Tensor:
        """Return the parameters as they are on the device now."""
        self.expire()
        return self.params

    def expire(self) -> None:
        """The parameters on the device may have changed: the next access fetches them."""
        self._version = None

    def write_back(self, *, may_be_unseen: bool = False) -> None:
        """Send the parameters to the device if they have been changed here since they were fetched.

        `may_be_unseen`: the engine may have written to them, which has no version.
        """
        if self._version is None:
            return
        flat = self._memory["params"]
        if may_be_unseen or flat._version != self._version:
            self.send_params()
            self._version = flat._version

    def send_params(self) -> None:
        """Copy the parameters to the device, before what the current stream does next."""
        self._send("params", self.on_device.params)

    def release_params(self) -> None:
        """Wait until the device has read the last parameters, which may now be overwritten."""
        self._release("params")

    @property
    def received_params(self) -> torch.Tensor:
        """Memory for parameters that come from elsewhere, before `send_params`."""
        return self._flat("params")


def _nothing() -> None:
    """Follow a copy with nothing else."""


def _ready() -> Errand[Handle]:
    """Return an exchange that has ended."""
    ready: Errand[Handle] = Errand(lambda: Together(()).work())
    ready.run()
    return ready


class CpuBucket(HostBucket):
    """A bucket that is in host memory anyway, in a model of which other buckets are not."""

    def __init__(self, bucket: Bucket) -> None:
        self.index, self.label = bucket.index, bucket.label
        self.on_device = bucket
        self._memory = {"grads": bucket.grads, "averaged": bucket.averaged}

    @property
    def params(self) -> torch.Tensor:
        return self.on_device.params

    received_params = params

    def fetch_gradients(self, source: torch.Tensor | None = None) -> Errand[None]:
        if source is not None and source is not self.grads:
            self.grads.copy_(source)
        errand = Errand(_nothing)
        errand.run()
        return errand

    def _send(self, name: str, target: torch.Tensor) -> None:
        """Copy nothing: both are the same memory."""

    def _release(self, name: str) -> None:
        """Wait for nothing."""

    def expire(self) -> None:
        """Expire nothing."""

    def write_back(self, *, may_be_unseen: bool = False) -> None:
        """Copy nothing."""
