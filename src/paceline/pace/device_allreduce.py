"""allreduce of buckets that are on a device.

    own backend    DeviceAllReduce: the device's collectives (NCCL), on streams; no host waits
    through host   HostStaged: copied to engine memory, averaged by the engine, copied back

The used-parameter mask is host knowledge (which hooks ran), so the engine reduces it on the host;
no worker asks its device for it. A lost worker is noticed there, too.

Where a model has parameters on the CPU and on a device, each bucket goes its own way (ByPlacement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.comm.device_group import DeviceGroup, StreamResult
from paceline.comm.device_route import naming_errors
from paceline.comm.devices import is_on_device
from paceline.comm.group import Group
from paceline.comm.host_route import Arrival, HostRoute
from paceline.compress.codec import Segment
from paceline.pace.allreduce import COMPOUND, MaskAverage
from paceline.pace.exchange import Bucket, Exchange
from paceline.runtime.work import Handle

# Their sum may overflow where the mean does not, so they are divided before they are added.
_NARROW = (torch.float16, torch.bfloat16)


class DeviceAllReduce(Exchange):
    """Averages gradients with the device's own backend.

    The mean is computed in one place: sums are divided on a stream of this exchange, after the
    backend has added and while backward continues. It is memory of the bucket, which lives on until
    the stream that frees it has waited for the result.
    """

    traits = replace(COMPOUND, work_is_whole=True, checks_late=True)

    def __init__(self, group: Group, collectives: DeviceGroup) -> None:
        self._collectives = collectives
        self._mask = MaskAverage(group)
        self._after = torch.Stream(collectives.device)  # divides

    def submit(self, bucket: Bucket, step: int) -> Handle:  # noqa: ARG002
        with naming_errors(self._collectives.owner, self._collectives.device):
            return self._submit(bucket)

    def _submit(self, bucket: Bucket) -> Handle:
        averaged, size = bucket.averaged, self._collectives.size
        if averaged is not bucket.grads:
            averaged.copy_(bucket.grads)
        is_narrow = averaged.dtype in _NARROW
        if is_narrow:
            averaged.div_(size)
        work = self._collectives.all_reduce(averaged)
        done = torch.Event(averaged.device)
        with self._after:
            work.wait()
            if not is_narrow:
                averaged.div_(size)
            done.record(self._after)
        return StreamResult(done)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        return self._mask.average(here)


@dataclass
class StagedBucket:
    """What an exchange on the host sees of a bucket on a device."""

    bucket: Bucket
    grads: torch.Tensor  # in engine memory
    averaged: torch.Tensor
    params: torch.Tensor

    def __post_init__(self) -> None:
        self.index, self.label = self.bucket.index, self.bucket.label
        self.size, self.dtype = self.bucket.size, self.bucket.dtype

    @property
    def segments(self) -> Sequence[Segment]:
        return self.bucket.segments

    @property
    def absent(self) -> Sequence[int]:
        return self.bucket.absent


class HostStaged(Exchange):
    """Runs an exchange of the host for buckets on a device.

    `inner` is called on an errand thread, in the order of the buckets, and has a group of its own:
    the script's thread reduces the mask meanwhile.
    """

    def __init__(
        self, group: Group, route: HostRoute, inner: Exchange, *, in_place: bool = False
    ) -> None:
        self._route, self._inner, self._in_place = route, inner, in_place
        self._mask = MaskAverage(group)
        self._staged: dict[int, StagedBucket] = {}  # by bucket index
        self.traits = replace(inner.traits, may_wait_singly=False, checks_late=True)

    def take(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            count, dtype = bucket.grads.numel(), bucket.grads.dtype
            grads = self._route.allocate(count, dtype)
            averaged = grads if self._in_place else self._route.allocate(count, dtype)
            nothing = torch.empty(0, dtype=dtype)
            self._staged[bucket.index] = StagedBucket(bucket, grads, averaged, nothing)
        self._inner.take([self._staged[bucket.index] for bucket in buckets])

    def submit(self, bucket: Bucket, step: int) -> Handle:
        staged = self._staged[bucket.index]
        sent = self._route.send(
            bucket.grads, staged.grads, lambda: self._inner.submit(staged, step)
        )
        return Arrival(self._route.bring(sent, staged.averaged, bucket.averaged))

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        return self._mask.average(here)


class ByPlacement(Exchange):
    """Buckets on the CPU go one way, buckets on a device another. Both are averages."""

    def __init__(self, on_host: Exchange, on_device: Exchange) -> None:
        self._on_host, self._on_device = on_host, on_device
        self.traits = replace(on_device.traits, work_is_whole=False, may_wait_singly=False)

    def _exchange_of(self, bucket: Bucket) -> Exchange:
        return self._on_device if is_on_device(bucket.grads) else self._on_host

    def take(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._exchange_of(bucket).take([bucket])

    def submit(self, bucket: Bucket, step: int) -> Handle:
        return self._exchange_of(bucket).submit(bucket, step)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        return self._on_host.reduce_used_mask(here)
