"""Means of all workers in fewer bytes: of gradients, and of models.

Each bucket makes a compressed exchange, a Journey (compress/journey.py). Its second hop is in a
group of its own, where the order is that of the buckets again: when it can begin differs from
worker to worker.

Of models, the change that each worker has made since the block began is compressed, which is small;
the mean of the models is the value at the beginning plus the mean of the changes.
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
from paceline.compress.registry import CodecSpec, parse_codec
from paceline.errors import UsageError
from paceline.observe.telemetry.traffic import CodecStats
from paceline.pace.allreduce import COMPOUND, AllReduce
from paceline.pace.exchange import Bucket
from paceline.pace.method import Setting
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
        self._second_group = another("second hop")
        self._is_elastic = is_elastic
        self._journeys: dict[int, Journey] = {}  # by bucket index
        self._waiting: deque[Journey] = deque()  # for their second hop
        self._first = 0
        self.accounts: list[CodecStats] = []  # what each has saved and cost

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets; those that are not float32 are sent uncompressed."""
        for bucket in buckets:
            layout = layout_of(bucket, self._first, self.codec.spec)
            if layout is not None:
                ground = Ground(layout, self._allocate, self._group.rank, self._is_elastic)
                journey = self._journeys[bucket.index] = self.codec.journey(ground)
                self.accounts.append(journey.account)
            self._first += bucket.grads.numel()

    def of(self, bucket: Bucket) -> Journey | None:
        """Return the journey of a bucket, or None if it is sent uncompressed."""
        return self._journeys.get(bucket.index)

    def start(self, journey: Journey, values: torch.Tensor, key: int) -> Work[Any]:
        """Start it; forward others whose first hop is done meanwhile."""
        work = journey.start(values, self._group, key)
        self._waiting.append(journey)
        self.forward_some()
        return work

    def forward_some(self) -> None:
        """Start the second hops that are due, without waiting."""
        while self._waiting and self._waiting[0].is_here:
            self._waiting.popleft().forward(self._second_group)

    def forward_all(self) -> None:
        """Start all second hops; blocks until they can begin."""
        while self._waiting:
            self._waiting.popleft().forward(self._second_group)

    def begin_again(self) -> None:
        """Forget those in transit: all will be sent again."""
        self._waiting.clear()

    # -- state: residuals are each worker's own ---------------------------------------------------

    def state(self) -> State:
        """Return what is kept of each journey, by number, and how often each was made."""
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
        """Load such a state."""
        del change
        self.state().fill(state)
        for journey, steps in zip(self._journeys.values(), state.counts, strict=True):
            journey.steps = steps


def layout_of(bucket: Bucket, first: int, spec: CodecSpec) -> Layout | None:
    """Return what of a bucket is compressed, or None. The same on all workers."""
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
        """Manage more buckets."""
        self.journeys.take(buckets)

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the part of a bucket's gradients that has not been sent yet, or None."""
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


class Means:
    """Averages flat tensors of all workers. Main thread only."""

    def __init__(self, setting: Setting) -> None:
        self._workers = setting.workers
        self._changes: dict[int, torch.Tensor] = {}  # by bucket index
        codec = parse_codec(setting.options["compress"])
        _check(setting, codec)
        self.compresses = codec.is_on
        self._journeys: Journeys | None = None
        if codec.is_on and setting.another is not None:
            self._journeys = Journeys(
                codec,
                setting.allocate,
                setting.workers,
                setting.another,
                is_elastic=setting.is_elastic,
            )
            setting.open_books(str(codec), self._journeys.accounts)

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets."""
        if self._journeys is None:
            return
        self._journeys.take(buckets)
        for bucket in buckets:
            if self._journeys.of(bucket) is not None:
                self._changes[bucket.index] = torch.empty_like(bucket.params)

    def start(
        self,
        bucket: Bucket,
        values: torch.Tensor,
        begin: torch.Tensor | None,
        out: torch.Tensor | None,
        *,
        key: int,
        is_last: bool,
    ) -> Work[Any]:
        """Start to compute the mean of `values` into `out`; all workers began with `begin`.

        With the same key the same data is sent again. The last time nothing is left out: it would
        never be sent.
        """
        journey = None if self._journeys is None else self._journeys.of(bucket)
        if journey is None or self._journeys is None or begin is None or is_last:
            work = self._workers.all_reduce(values, "mean", out=out, async_op=True)
            assert isinstance(work, Work)
            if journey is not None:
                journey.forget()
            return work
        change = torch.sub(values, begin, out=self._changes[bucket.index])
        sent, journeys = self._journeys.start(journey, change, key), self._journeys

        def finish() -> None:
            assert out is not None
            journeys.forward_all()
            journey.finish(out)
            out.add_(begin)

        return Work(sent.handle, finish, keep=sent)

    def move_on(self) -> None:
        """Continue those in transit, without waiting."""
        if self._journeys is not None:
            self._journeys.forward_some()

    def begin_again(self) -> None:
        """Send everything in transit again: a worker was lost."""
        if self._journeys is not None:
            self._journeys.begin_again()

    def state(self) -> State:
        """Return what the codec keeps, and how often each bucket was exchanged."""
        return State([]) if self._journeys is None else self._journeys.state()

    def load(self, state: State, change: Change | None) -> None:
        """Load such a state."""
        if self._journeys is not None:
            self._journeys.load(state, change)


def _check(setting: Setting, codec: CodecSpec) -> None:
    if codec.entry.only_gradients:
        raise UsageError(
            f"pace {setting.pace} averages models, and compress={codec} cannot be used on them:"
            f" {codec.entry.only_gradients}"
        )
    if codec.is_on and setting.centre is not None:
        raise UsageError(
            f"pace {setting.pace} with servers: models are sent to them uncompressed; leave out"
            " compress, or start the job without -s"
        )
