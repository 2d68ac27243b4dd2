"""Compressed averages where hosts have several workers: once for each host, not for each worker.

    reduce      the workers of a host add up their gradients in shared memory, uncompressed
    exchange    the first worker of each host sends the sum, compressed (compress/reduction.py)
    broadcast   it sends the result to the other workers of its host

So a host sends what one worker would, and encodes it once. The first worker of the host keeps what
the codec leaves out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress.codec import Allocate, make_codec
from paceline.compress.reduction import CompressedReduction
from paceline.compress.registry import CodecSpec
from paceline.pace.allreduce import COMPOUND, AllReduce
from paceline.pace.compressed import BucketReductions, layout_of
from paceline.pace.exchange import Bucket
from paceline.runtime.work import Handle, Work
from paceline.state.protocol import Part


class _Trip:
    """The exchange of one bucket."""

    def __init__(
        self, bucket: Bucket, reduction: CompressedReduction | None, total: torch.Tensor | None
    ) -> None:
        self.bucket = bucket
        self.reduction = reduction  # of the first worker of a host only, and so is the next
        self.total = total
        self.added: Work[Any] | None = None
        self.step = 0

    @property
    def is_added(self) -> bool:
        """Whether the host's sum is complete, without an error."""
        return self.added is not None and self.added.done() and self.added.error() is None


class HostFirst(AllReduce):
    """Averages gradients among all workers: on each host first, then between hosts."""

    def __init__(
        self,
        group: Group,
        host: Group,
        num_hosts: int,
        spec: CodecSpec,
        reductions: BucketReductions | None,  # of the first worker of each host
        allocate: Allocate,
    ) -> None:
        super().__init__(group)
        self.reductions = reductions
        self.traits = replace(COMPOUND, keeps_residual=make_codec(spec).has_feedback)
        self._host = host
        self._spec = spec
        # The mean over hosts of such sums is the mean over workers.
        self._scale = num_hosts / group.size
        self._allocate = allocate
        self._trips: dict[int, _Trip] = {}  # by bucket index
        self._waiting: deque[_Trip] = deque()  # for the sum of the host
        self._last = -1

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets."""
        if self.reductions is not None:
            self.reductions.take(buckets)
        for bucket in buckets:
            if layout_of(bucket, 0, self._spec) is None:
                continue
            reduction, total = None, None
            if self.reductions is not None:
                reduction = self.reductions.of(bucket)
                total = self._allocate(bucket.grads.numel(), torch.float32)
            self._trips[bucket.index] = _Trip(bucket, reduction, total)

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the part of a bucket's gradients that has not been sent yet, or None."""
        reduction = None if self.reductions is None else self.reductions.of(bucket)
        left = None if reduction is None else reduction.left_out()
        return None if left is None else left / self._scale

    @property
    def residuals(self) -> Part | None:
        return self.reductions

    def submit(self, bucket: Bucket, step: int) -> Handle:
        if bucket.index <= self._last:  # another pass
            self._waiting.clear()
            if self.reductions is not None:
                self.reductions.begin_again()
        self._last = bucket.index
        trip = self._trips.get(bucket.index)
        if trip is None:
            return super().submit(bucket, step)
        work = self._host.reduce(bucket.grads, 0, "sum", out=trip.total, async_op=True)
        assert isinstance(work, Work)
        trip.added, trip.step = work, step
        self._waiting.append(trip)
        while self._waiting and self._waiting[0].is_added:
            self._send(self._waiting.popleft())
        if self.reductions is not None:
            self.reductions.forward_some()
        return Work(work.handle, lambda: self._finish(trip), keep=work)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        self._send_all()
        return super().reduce_used_mask(here)

    def _send(self, trip: _Trip) -> None:
        assert trip.added is not None
        trip.added.wait()
        if self.reductions is not None and trip.reduction is not None and trip.total is not None:
            self.reductions.start(trip.reduction, trip.total.mul_(self._scale), trip.step)

    def _send_all(self) -> None:
        while self._waiting:
            self._send(self._waiting.popleft())
        if self.reductions is not None:
            self.reductions.forward_all()

    def _finish(self, trip: _Trip) -> None:
        self._send_all()
        if trip.reduction is not None:
            trip.reduction.finish(trip.bucket.averaged)
        self._host.broadcast(trip.bucket.averaged, 0)
