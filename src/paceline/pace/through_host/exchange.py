"""ThroughHost: any exchange, for buckets on a device.

    submit        the copy of the gradients to the host begins (device -> host)
    meanwhile     buckets whose copy is complete are submitted to the inner exchange, in order
    wait          all that are left are submitted; then the agreed gradients go to the device

The inner exchange is called on the thread that runs backward, as always. That thread never waits
for the device, only for an errand (comm/device_route.py): and as the host is ahead of the device
during backward, most buckets are submitted at its end, while the device still computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.comm.device_route import Errand
from paceline.comm.devices import is_on_device
from paceline.comm.host_route import HostRoute
from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.pace.through_host.host_bucket import CpuBucket, HostBucket
from paceline.runtime.work import Handle
from paceline.state.protocol import Part


class HostBuckets:
    """The host buckets of one training, by the index of the bucket on the device."""

    def __init__(self, make_route: Callable[[], HostRoute]) -> None:
        self._make_route = make_route  # at the first bucket: some paces need none
        self._route: HostRoute | None = None
        self._hosts: dict[int, HostBucket] = {}

    def take(self, buckets: Sequence[Bucket]) -> list[HostBucket]:
        """Return the host buckets of these; made at the first call."""
        return [self.of(bucket) for bucket in buckets]

    def of(self, bucket: Bucket) -> HostBucket:
        """Return the host bucket of a bucket."""
        if bucket.index not in self._hosts:
            self._hosts[bucket.index] = self._make(bucket)
        return self._hosts[bucket.index]

    def _make(self, bucket: Bucket) -> HostBucket:
        if not is_on_device(bucket.params):
            return CpuBucket(bucket)
        return HostBucket(bucket, self.route)

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return engine memory, pinned if possible."""
        return self.route.allocate(count, dtype)

    @property
    def route(self) -> HostRoute:
        """The route between the device and engine memory."""
        if self._route is None:
            self._route = self._make_route()
        return self._route

    def expire(self) -> None:
        """The parameters on the device may have changed: a method that reads them fetches them."""
        for host in self:
            host.expire()

    def write_back(self, *, may_be_unseen: bool = False) -> None:
        """Send what a method has changed to the device; see HostBucket."""
        for host in self:
            host.write_back(may_be_unseen=may_be_unseen)

    def __iter__(self) -> Iterator[HostBucket]:
        return iter(self._hosts.values())


class Trip:
    """The exchange of one bucket: a Handle of which the copy to the host is the first part."""

    def __init__(self, owner: ThroughHost, host: HostBucket, step: int) -> None:
        self.host, self.step = host, step
        self._owner = owner
        self.copied: Errand[None] = host.fetch_step(step)
        self.inner: Handle | None = None  # after the inner exchange has got the bucket
        self._is_back = False

    def done(self) -> bool:
        return self.inner is not None and self.inner.done()

    def error(self) -> Exception | None:
        return self.copied.error() if self.inner is None else self.inner.error()

    def wait(self, timeout_s: float | None = None) -> object:
        self._owner.submit_copied(wait=True)
        assert self.inner is not None, "all trips have been submitted"
        result = self.inner.wait(timeout_s)
        if not self._is_back:
            self._is_back = True
            self.host.send_averages()
        return result


class ThroughHost(Exchange):
    """Runs an exchange on host buckets."""

    def __init__(self, inner: Exchange, hosts: HostBuckets) -> None:
        self._inner, self._hosts = inner, hosts
        self._waiting: deque[Trip] = deque()  # for their copy, in order
        self._last = -1

    @property
    def traits(self) -> ExchangeTraits:  # type: ignore[override]
        return self._inner.traits

    @property
    def inner(self) -> Exchange:
        """The exchange of the host buckets."""
        return self._inner

    def take(self, buckets: Sequence[Bucket]) -> None:
        self._inner.take(self._hosts.take(buckets))

    def submit(self, bucket: Bucket, step: int) -> Handle:
        if bucket.index <= self._last:  # another pass, or the same one again
            self._waiting.clear()
        self._last = bucket.index
        trip = Trip(self, self._host_of(bucket), step)
        self._waiting.append(trip)
        self.submit_copied()
        return trip

    def _host_of(self, bucket: Bucket) -> HostBucket:
        return self._hosts.of(bucket)

    def submit_copied(self, *, wait: bool = False) -> None:
        """Submit the buckets whose gradients are on the host; `wait`: all of them."""
        while self._waiting and (wait or self._waiting[0].copied.done()):
            trip = self._waiting.popleft()
            trip.copied.wait()
            trip.host.release_averages()
            trip.inner = self._inner.submit(trip.host, trip.step)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        self.submit_copied(wait=True)
        return self._inner.reduce_used_mask(here)

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the part of a bucket's gradients that has not been sent yet, or None."""
        left = self._inner.left_out(self._host_of(bucket))
        return None if left is None else left.to(bucket.grads.device)

    @property
    def residuals(self) -> Part | None:
        return self._inner.residuals
