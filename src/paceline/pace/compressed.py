"""Means of all workers in fewer bytes: of gradients, and of models.

Each bucket has a CompressedReduction (compress/reduction.py). Its second hop is in a
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
from paceline.compress.codec import Allocate, CodecContext, Layout, make_codec, plan
from paceline.compress.reduction import CompressedReduction
from paceline.compress.registry import CodecSpec, parse_codec
from paceline.errors import UsageError
from paceline.observe.telemetry.traffic import CodecStats
from paceline.pace.allreduce import COMPOUND, AllReduce
from paceline.pace.exchange import Bucket
from paceline.pace.method import Setting
from paceline.runtime.work import Handle, Work
from paceline.state.protocol import Change, Part, State

_NOTHING = torch.empty(0)


class BucketReductions(Part):
    """The reductions of some buckets, in the order in which they are sent. Main thread only."""

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
        self._reductions: dict[int, CompressedReduction] = {}  # by bucket index
        self._waiting: deque[CompressedReduction] = deque()  # for their second hop
        self._first = 0
        self.accounts: list[CodecStats] = []  # what each has saved and cost

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets; those that are not float32 are sent uncompressed."""
        for bucket in buckets:
            layout = layout_of(bucket, self._first, self.codec.spec)
            if layout is not None:
                context = CodecContext(layout, self._allocate, self._group.rank, self._is_elastic)
                reduction = self._reductions[bucket.index] = self.codec.reduction(context)
                self.accounts.append(reduction.account)
            self._first += bucket.size

    def of(self, bucket: Bucket) -> CompressedReduction | None:
        """Return the reduction of a bucket, or None if it is sent uncompressed."""
        return self._reductions.get(bucket.index)

    def start(self, reduction: CompressedReduction, values: torch.Tensor, key: int) -> Work[Any]:
        """Start it; forward others whose first hop is done meanwhile."""
        work = reduction.start(values, self._group, key)
        self._waiting.append(reduction)
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
        """Return what is kept of each reduction, by number, and how often each was made."""
        reductions, kept = self._reductions.values(), list[tuple[bool, torch.Tensor]]()
        for reduction in reductions:
            kept += [(True, tensor) for tensor in reduction.common()]
            kept += [(False, tensor) for tensor in reduction.own()]
        return State(
            counts=[reduction.steps for reduction in reductions],
            copied={str(n): tensor for n, (is_common, tensor) in enumerate(kept) if is_common},
            own={str(n): tensor for n, (is_common, tensor) in enumerate(kept) if not is_common},
        )

    def load(self, state: State, change: Change | None) -> None:
        """Load such a state."""
        del change
        self.state().fill(state)
        for reduction, steps in zip(self._reductions.values(), state.counts, strict=True):
            reduction.steps = steps


def layout_of(bucket: Bucket, first: int, spec: CodecSpec) -> Layout | None:
    """Return what of a bucket is compressed, or None. The same on all workers."""
    if bucket.dtype != torch.float32:
        return None
    layout = plan(bucket.segments, bucket.size, first, spec.min_elements)
    return layout if layout.large else None


class CompressedAllReduce(AllReduce):
    """Averages gradients among all workers, in fewer bytes."""

    def __init__(self, group: Group, reductions: BucketReductions) -> None:
        super().__init__(group)
        self.reductions = reductions
        self.traits = replace(COMPOUND, keeps_residual=reductions.codec.has_feedback)
        self._last = -1

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets."""
        self.reductions.take(buckets)

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the part of a bucket's gradients that has not been sent yet, or None."""
        reduction = self.reductions.of(bucket)
        return None if reduction is None else reduction.left_out()

    def reduction_of(self, bucket: Bucket) -> CompressedReduction | None:
        return self.reductions.of(bucket)

    @property
    def residuals(self) -> Part:
        return self.reductions

    def submit(self, bucket: Bucket, step: int) -> Handle:
        if bucket.index <= self._last:  # another pass, or the same one again
            self.reductions.begin_again()
        self._last = bucket.index
        reduction = self.reductions.of(bucket)
        if reduction is None:
            return super().submit(bucket, step)
        # A bucket on a device may have been encoded there: then the host has no gradients of it.
        values = _NOTHING if reduction.is_encoded(step) else bucket.grads
        work = self.reductions.start(reduction, values, step)
        return Work(work.handle, lambda: self._finish(reduction, bucket), keep=work)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        self.reductions.forward_all()
        return super().reduce_used_mask(here)

    def _finish(self, reduction: CompressedReduction, bucket: Bucket) -> None:
        self.reductions.forward_all()
        if reduction.is_decoded_elsewhere:
            reduction.settle()
        else:
            reduction.finish(bucket.averaged)


class Means:
    """Averages flat tensors of all workers. Main thread only."""

    def __init__(self, setting: Setting) -> None:
        self._workers = setting.workers
        self._changes: dict[int, torch.Tensor] = {}  # by bucket index
        codec = parse_codec(setting.options["compress"])
        _check(setting, codec)
        self.compresses = codec.is_on
        self._reductions: BucketReductions | None = None
        if codec.is_on and setting.another is not None:
            self._reductions = BucketReductions(
                codec,
                setting.allocate,
                setting.workers,
                setting.another,
                is_elastic=setting.is_elastic,
            )
            setting.open_books(str(codec), self._reductions.accounts)

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets."""
        if self._reductions is None:
            return
        self._reductions.take(buckets)
        for bucket in buckets:
            if self._reductions.of(bucket) is not None:
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
        reduction = None if self._reductions is None else self._reductions.of(bucket)
        if reduction is None or self._reductions is None or begin is None or is_last:
            work = self._workers.all_reduce(values, "mean", out=out, async_op=True)
            assert isinstance(work, Work)
            if reduction is not None:
                reduction.forget()
            return work
        change = torch.sub(values, begin, out=self._changes[bucket.index])
        sent, reductions = self._reductions.start(reduction, change, key), self._reductions

        def finish() -> None:
            assert out is not None
            reductions.forward_all()
            reduction.finish(out)
            out.add_(begin)

        return Work(sent.handle, finish, keep=sent)

    def move_on(self) -> None:
        """Continue those in transit, without waiting."""
        if self._reductions is not None:
            self._reductions.forward_some()

    def begin_again(self) -> None:
        """Send everything in transit again: a worker was lost."""
        if self._reductions is not None:
            self._reductions.begin_again()

    def state(self) -> State:
        """Return what the codec keeps, and how often each bucket was exchanged."""
        return State([]) if self._reductions is None else self._reductions.state()

    def load(self, state: State, change: Change | None) -> None:
        """Load such a state."""
        if self._reductions is not None:
            self._reductions.load(state, change)


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
