"""ServerExchange for buckets on a device: tables have the host buckets' memory.

    push, replace    gradients are copied to the host first (device -> host)
    averages         in lockstep they go to the device when they have arrived
    assign           parameters are copied to the host first
    show             fresh parameters go to the device, before what the script does next

Servers stay on CPUs. Servers of this host read gradients in place, where the device has put them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from paceline.pace.exchange import Bucket
from paceline.pace.parameter_server import ServerExchange
from paceline.pace.through_host.exchange import HostBuckets
from paceline.pace.through_host.host_bucket import HostBucket
from paceline.ps.packing import Packing
from paceline.ps.spec import Rule
from paceline.runtime.work import Together, Work


class _Push:
    """A push whose first part is the copy of the gradients to the host; a Handle."""

    def __init__(
        self, owner: DeviceServerExchange, bucket: Bucket, absent: Sequence[int], step: int
    ) -> None:
        self._owner, self.bucket, self.absent, self.step = owner, bucket, absent, step
        self.copied = owner.fetch(bucket)
        self.sent: Work[Any] | None = None
        self._is_back = False
        self.replies: Any = []

    def done(self) -> bool:
        return self.sent is not None and self.sent.done()

    def error(self) -> Exception | None:
        return self.copied.error() if self.sent is None else self.sent.error()

    def wait(self, timeout_s: float | None = None) -> None:
        self._owner.push_copied(wait=True)
        assert self.sent is not None, "all buckets have been pushed"
        self.replies = self.sent.wait(timeout_s)
        if not self._is_back:
            self._is_back = True
            self._owner.show_averages(self.bucket)


class DeviceServerExchange(ServerExchange):
    """Exchanges buckets on a device through tables of host buckets."""

    def __init__(self, rule: Rule, packing: Packing | None, hosts: HostBuckets) -> None:
        super().__init__(rule, packing)
        self._hosts = hosts
        self._waiting: deque[_Push] = deque()  # for their copy, in order
        self._outboxes: dict[int, torch.Tensor] = {}  # on the device, where not gradients are sent

    def host_of(self, bucket: Bucket) -> HostBucket:
        """Return the memory of a bucket that the tables use."""
        return self._hosts.of(bucket)

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:
        if self._rule.push != "grad" or self.pushes_late:
            return Together(()).work()
        pushed = _Push(self, bucket, bucket.absent, step)
        self._waiting.append(pushed)
        self.push_copied()
        work: Work[Any] = Work(pushed, lambda: pushed.replies)
        self._pushed.append((bucket, work))
        return work

    def push_copied(self, *, wait: bool = False) -> None:
        """Push the buckets whose gradients are on the host; `wait`: all of them."""
        while self._waiting and (wait or self._waiting[0].copied.done()):
            one = self._waiting.popleft()
            one.copied.wait()
            self._release_averages(one.bucket)
            one.sent = super().push(one.bucket, one.absent, one.step)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        self.push_copied(wait=True)
        return super().reduce_used_mask(here)

    def show_averages(self, bucket: Bucket) -> None:
        """Copy averages that have arrived to the device."""
        if self._rule.aggregate:
            self.host_of(bucket).send_averages()

    def push(self, bucket: Bucket, absent: Sequence[int], key: int | None = None) -> Work[Any]:
        self.fetch(bucket).wait()
        self._release_averages(bucket)
        return super().push(bucket, absent, key)

    def replace(self, bucket: Bucket, absent: Sequence[int]) -> None:
        self.fetch(bucket).wait()
        super().replace(bucket, absent)

    def assign(self, bucket: Bucket, numbers: Sequence[int]) -> None:
        self.collect(bucket)
        super().assign(bucket, numbers)

    def collect(self, bucket: Bucket) -> None:
        self.host_of(bucket).fetch_params()

    def outbox(self, bucket: Bucket) -> torch.Tensor:
        """Return the memory, on the device, from which a bucket is pushed."""
        if self._rule.push == "grad":
            return bucket.grads
        if bucket.index not in self._outboxes:
            self._outboxes[bucket.index] = torch.empty_like(bucket.params)
        return self._outboxes[bucket.index]

    def fetch(self, bucket: Bucket) -> Any:
        """Start to copy to the host what is pushed."""
        return self.host_of(bucket).fetch_gradients(self.outbox(bucket))

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the part of a bucket's gradients that has not been sent yet, or None."""
        left = super().left_out(bucket)
        return None if left is None else left.to(bucket.grads.device)

    # -- parameters ---------------------------------------------------------------------------

    def commit(self, *arguments: Any, **options: Any) -> Work[Any]:
        self._release_params()
        return super().commit(*arguments, **options)

    def commit_each(self, *arguments: Any, **options: Any) -> Any:
        self._release_params()
        return super().commit_each(*arguments, **options)

    def pull(self, *, in_turn: bool = False) -> Work[Any]:
        self._release_params()
        return super().pull(in_turn=in_turn)

    def show(self, buckets: Sequence[Bucket]) -> None:
        """Copy parameters that have arrived to the device."""
        for bucket in buckets:
            self.host_of(bucket).send_params()

    def _release_params(self) -> None:
        """Before servers write fresh values: the device has read the last ones."""
        for host in self._hosts:
            host.release_params()

    def _release_averages(self, bucket: Bucket) -> None:
        if self._rule.aggregate:
            self.host_of(bucket).release_averages()
