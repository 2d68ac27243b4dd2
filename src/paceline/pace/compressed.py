"""Lockstep with fewer bytes: the mean over all workers of gradients that a codec has gone over.

Each bucket makes a journey (compress/journey.py). Its second hop is in a group of its own, where
the order is that of the buckets again: when it can begin differs from worker to worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress.codec import Allocate, Ground, Layout, make_codec, plan
from paceline.compress.journey import Journey
from paceline.compress.registry import CodecSpec
from paceline.observe.telemetry.traffic import Account
from paceline.pace.allreduce import COMPOUND, AllReduce
from paceline.pace.exchange import Bucket
from paceline.runtime.work import Handle, Work
from paceline.state.protocol import Change, Part, State


class Journeys(Part):
    """The journeys of some buckets, in the order in which they are sent. Main thread only."""

    def __init__(
        self,
        spec: CodecSpec,
        allocate: Allocate,
        group: Group,
        another: Callable[[str], Group],
        *,
        is_elastic: bool,
    ) -> None:
        self.codec = make_codec(spec)
        self._allocate = allocate
        self._group = group
        self._tellers = another("second hop")
        self._is_elastic = is_elastic
        self._journeys: dict[int, Journey] = {}  # by the number of the bucket
        self._waiting: deque[Journey] = deque()  # for their second hop
        self._first = 0
        self.accounts: list[Account] = []  # what each has saved and cost

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Look after more buckets; those of other kinds of numbers travel as they are."""
        for bucket in buckets:
            layout = layout_of(bucket, self._first, self.codec.spec)
            if layout is not None:
                ground = Ground(layout, self._allocate, self._group.rank, self._is_elastic)
                journey = self._journeys[bucket.index] = self.codec.journey(ground)
                self.accounts.append(journey.account)
            self._first += bucket.grads.numel()

    def of(self, bucket: Bucket) -> Journey | None:
        """Return the journey of a bucket; None: it travels as it is."""
        return self._journeys.get(bucket.index)

    def start(self, journey: Journey, values: torch.Tensor, key: int) -> Work[Any]:
        """Send it off; forward others whose first hop is done meanwhile."""
        work = journey.start(values, self._group, key)
        self._waiting.append(journey)
        self.forward_some()
        return work

    def forward_some(self) -> None:
        """Do the second hops that are due, without waiting."""
        while self._waiting and self._waiting[0].is_here:
            self._waiting.popleft().forward(self._tellers)

    def forward_all(self) -> None:
        """Do all second hops; blocks until they can be done."""
        while self._waiting:
            self._waiting.popleft().forward(self._tellers)

    def begin_again(self) -> None:
        """Forget those under way: all are sent again."""
        self._waiting.clear()

    # -- state: what is left out is each worker's own ---------------------------------------------

    def state(self) -> State:
        """Return what is kept of each journey, by number, and how often each has travelled."""
        journeys, kept = self._journeys.values(), list[tuple[bool, torch.Tensor]]()
        for journey in journeys:
            kept += [(True, tensor) for tensor in journey.common()]
            kept += [(False, tensor) for tensor in journey.own()]
        return State(
            counts=[journey.steps for journey in journeys],
            copied={str(n): tensor for n, (is_common, tensor) in enumerate(kept) if is_common},
            own={str(n): tensor for n, (is_common, tensor) in enumerate(kept) if not is_common},
        )

    def load(self, state: State, change: Change | None) -> None:
        """Take over what is kept, and go on from those counts."""
        del change
        self.state().fill(state)
        for journey, steps in zip(self._journeys.values(), state.counts, strict=True):
            journey.steps = steps


def layout_of(bucket: Bucket, first: int, spec: CodecSpec) -> Layout | None:
    """Say what of a bucket is compressed; None: nothing. Alike on all workers."""
    if bucket.grads.dtype != torch.float32:
        return None
    layout = plan(bucket.segments, bucket.grads.numel(), first, spec.min_elements)
    return layout if layout.large else None


class CompressedAllReduce(AllReduce):
    """Averages gradients among all workers, in fewer bytes."""

    def __init__(self, group: Group, journeys: Journeys) -> None:
        super().__init__(group)
        self.journeys = journeys
        self.traits = replace(COMPOUND, keeps_residual=journeys.codec.has_feedback)
        self._last = -1

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Look after more buckets."""
        self.journeys.take(buckets)

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return what of a bucket's gradients has not been sent yet; None: nothing."""
        journey = self.journeys.of(bucket)
        return None if journey is None else journey.left_out()

    @property
    def residuals(self) -> Part:
        return self.journeys

    def submit(self, bucket: Bucket, step: int) -> Handle:
        if bucket.index <= self._last:  # another pass, or the same one again
            self.journeys.begin_again()
        self._last = bucket.index
        journey = self.journeys.of(bucket)
        if journey is None:
            return super().submit(bucket, step)
        work = self.journeys.start(journey, bucket.grads, step)
        return Work(work.handle, lambda: self._finish(journey, bucket), keep=work)

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        self.journeys.forward_all()
        return super().call_roll(here)

    def _finish(self, journey: Journey, bucket: Bucket) -> None:
        self.journeys.forward_all()
        journey.finish(bucket.averaged)
