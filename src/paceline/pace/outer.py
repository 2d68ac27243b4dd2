"""Local steps with an outer optimizer: every H steps the workers average their models.

One engine for all. After H steps of its own optimizer each worker is at x_i; with the mean m of all
x_i, the values w at which the block began, and G = m - w:

    D <- momentum * D + lr * G            the momentum of the outer optimizer
    w <- w + lr * G + momentum * D        Nesterov; or w + D without it

    local:H        lr 1, momentum 0, so that w = m
    post_local:H   the same, but the first steps are taken together (gradients averaged)
    bmuf:H         lr 1, momentum 1 - 1/N: block momentum, with Nesterov (NBM) or without (CBM)
    diloco:H       lr 0.7, momentum 0.9, Nesterov

Block momentum with Nesterov and DiLoCo are the same formula; a test checks that. The state of the
workers' own optimizers is not averaged.

FRAGMENTS: buckets may be averaged one part after the other, each H steps after its last time, so
that less is sent at once. With a DELAY the mean of a part is applied so many steps after it was
sent, and is in transit while they compute. The steps that a worker has taken meanwhile, from x_i to
y_i, are treated in one of two ways:

    late=replace   they are dropped: y_i <- w, or with MERGE a mix of the two, merge * y_i + ...
    late=shift     they are kept: y_i <- w + (y_i - x_i)

Without servers every worker has w and D, and computes the same from the same mean. With servers w
and D are on the servers (center.py): there torch's SGD makes the same step, of the mean of w - x_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.errors import PeerError, UsageError
from paceline.pace.allreduce import AllReduce
from paceline.pace.center import CentreTable, outer_settings
from paceline.pace.compressed import Means
from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.pace.method import Method, Setting
from paceline.runtime.work import Work
from paceline.state.protocol import Change, State

_LEAST_MOMENTUM = 1e-30  # so small that it changes nothing


@dataclass
class _OuterBucket:
    """The state of the outer optimizer for one bucket."""

    bucket: Bucket
    remote: CentreTable | None = None  # on the servers
    begin: torch.Tensor | None = None  # w; None if the next w is the mean itself
    momentum: torch.Tensor | None = None  # D
    sent: torch.Tensor | None = None  # x_i when it was sent; None: the parameters are sent
    mean: torch.Tensor | None = None
    work: Work[Any] | None = None
    met_at: int = 0  # the step after which it was last averaged


class OuterSteps(Method):
    """The engine; the paces are below."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.every = int(setting.pace.value)
        self.lr = setting.number("outer_lr", 1.0)
        self.nesterov = setting.options.get("nesterov", "yes") == "yes"
        self.delay = int(setting.number("delay"))
        self.merge = setting.number("merge")
        self.keeps_late = setting.options.get("late") == "shift"
        self.after = int(setting.number("after"))  # steps that are taken together first
        self._num_fragments = int(setting.number("fragments"))
        self._parts: list[_OuterBucket] = []
        self._check()
        self._means = Means(setting)

    @property
    def momentum(self) -> float:
        """What the outer optimizer keeps of its last change."""
        return self.setting.number("momentum")

    def _check(self) -> None:
        pace, fragments = self.setting.pace, self._num_fragments
        if self.every % fragments:
            raise UsageError(
                f"pace {pace}: {self.every} steps cannot be divided into {fragments} fragments;"
                f" choose a number of steps that is a multiple of {fragments}"
            )
        if self.delay and self.delay >= self.every // fragments:
            raise UsageError(
                f"pace {pace}: a delay of {self.delay} steps, expected less than the"
                f" {self.every // fragments} steps from one fragment to the next"
            )
        if self.merge > 1:
            raise UsageError(f"pace {pace}: merge={self.merge:g}, expected 0 to 1")
        if self.keeps_late and (self.merge or not self.delay):
            raise UsageError(
                f"pace {pace}: late=shift keeps the steps that were taken during a delay;"
                f" {'leave out merge' if self.merge else 'give a delay, such as delay=1'}"
            )
        if self.momentum >= 1:
            raise UsageError(f"pace {pace}: momentum={self.momentum:g}, expected less than 1")

    def describe(self) -> str:
        words = f"every {self.every} steps"
        if self._is_plain:
            return words
        return f"{words}, outer lr {self.lr:g}, momentum {self.momentum:.3g}"

    @property
    def _is_plain(self) -> bool:
        return self.lr == 1.0 and "momentum" not in self.setting.options

    # -- steps --------------------------------------------------------------------------------

    def exchange(self) -> Exchange | None:
        return _TogetherFirst(self) if self.after else None

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        self._means.take(buckets)
        for bucket in buckets:
            part = _OuterBucket(bucket)
            if self.setting.centre is not None:
                part.remote = self.setting.centre.add_bucket(bucket)
                part.begin = part.remote.values
            elif not self._is_plain:
                part.begin, part.momentum = bucket.params.clone(), torch.zeros_like(bucket.params)
            elif self._means.compresses:  # the change since then is compressed
                part.begin = bucket.params.clone()
            if part.remote is None:
                part.mean = self.setting.allocate(bucket.params.numel(), bucket.params.dtype)
            if self.delay:
                part.sent = self.setting.allocate(bucket.params.numel(), bucket.params.dtype)
            self._parts.append(part)

    @property
    def _stride(self) -> int:
        return self.every // self._num_fragments

    @property
    def _fragment(self) -> list[_OuterBucket]:
        """The parts that are averaged in the next round."""
        if self.is_last:  # perhaps in the middle of a block: it ends here
            return [part for part in self._parts if part.met_at < self.steps]
        return self._parts[self.rounds % self._num_fragments :: self._num_fragments]

    @property
    def is_due(self) -> bool:
        if not self._parts or self.steps < self.after:
            return False
        if self.is_last:
            return bool(self._fragment)
        return self.steps - self.after >= (self.rounds + 1) * self._stride + self.delay

    def after_step(self) -> None:
        """Start to send what will be applied `delay` steps from now."""
        self._means.move_on()
        if self.steps == self.after:  # the first block begins here
            for part in self._parts:
                part.met_at = self.steps
                if part.begin is not None:
                    part.begin.copy_(part.bucket.params)
                if (
                    part.remote is not None
                ):  # the same on all workers, which assign before they push
                    part.remote.assign()
        is_time = self.steps - self.after == (self.rounds + 1) * self._stride
        if self.delay and is_time:
            for part in self._fragment:
                assert part.sent is not None
                part.sent.copy_(part.bucket.params)
                self._send(part, part.sent)

    @property
    def is_under_way(self) -> bool:
        return any(part.work is not None for part in self._parts)

    def _send(self, part: _OuterBucket, values: torch.Tensor) -> None:
        if part.remote is not None:
            part.work = part.remote.push(values, self._gain / self.lr)
            return
        part.work = self._means.start(
            part.bucket, values, part.begin, part.mean, key=self.rounds, is_last=self.is_last
        )

    def run_round(self) -> None:
        try:
            self._average()
        except PeerError:
            self._means.begin_again()
            for part in self._fragment:
                if part.remote is None:
                    part.work = None
            raise

    def _average(self) -> None:
        fragment, centre = self._fragment, self.setting.centre
        for part in fragment:
            is_through = part.remote is not None and part.remote.is_committed
            if self.is_last and part.work is not None and not is_through:  # replaced by a newer one
                part.work.wait()
                part.work = None
            if part.work is None and not is_through:  # or it has failed with a lost worker
                is_old = part.sent is not None and not self.is_last
                values = part.sent if is_old else part.bucket.params
                assert values is not None
                self._send(part, values)
        for part in fragment:
            work, part.work = part.work, None
            if work is not None:
                work.wait()
        if centre is not None:
            tables = [part.remote for part in fragment if part.remote is not None]
            centre.commit(tables, self._outer_settings())

    def apply_round(self) -> None:
        with torch.no_grad():
            for part in self._fragment:
                self._move(part)
                if part.remote is not None:
                    part.remote.begin_next_step()

    def _move(self, part: _OuterBucket) -> None:
        """Let the outer optimizer make its step, and move the worker's values."""
        params, mean, target = part.bucket.params, part.mean, part.begin
        part.met_at = self.steps
        if part.remote is None and self._is_plain:
            if target is not None and mean is not None:
                target.copy_(mean)
            target = mean
        # With servers, they have done this.
        elif target is not None and mean is not None and part.momentum is not None:
            change = mean.sub_(target)
            part.momentum.mul_(self.momentum).add_(change, alpha=self._gain)
            self._advance(target, change, part.momentum)
        assert target is not None
        if self.is_last:
            params.copy_(target)
        elif self.keeps_late:
            assert part.sent is not None
            params.sub_(part.sent).add_(target)
        else:
            params.lerp_(target, 1.0 - self.merge) if self.merge else params.copy_(target)

    @property
    def _gain(self) -> float:
        return self.lr

    def _advance(self, begin: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor) -> None:
        if self.nesterov:
            begin.add_(change, alpha=self.lr).add_(momentum, alpha=self.momentum)
        else:
            begin.add_(momentum)

    def _outer_settings(self) -> dict[str, Any]:
        """Return the settings of torch's SGD that make the same step on the servers."""
        if self._is_plain:
            return outer_settings(lr=self.lr)
        # Without momentum torch's SGD has no state; here the momentum may change.
        momentum = max(self.momentum, _LEAST_MOMENTUM)
        return outer_settings(lr=self.lr, momentum=momentum, nesterov=self.nesterov)

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        part = next(part for part in self._parts if part.bucket is bucket)
        if part.met_at == self.steps and not (self.merge or self.keeps_late):
            return bucket.params.clone()  # all workers have just agreed on it
        if self._is_plain:
            return super().agreed(bucket)
        assert part.begin is not None
        return part.begin.clone()

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        shared, passing, served = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for number, part in enumerate(self._parts):
            if part.begin is not None:
                shared[f"begin.{number}"] = part.begin
            if part.momentum is not None:
                shared[f"momentum.{number}"] = part.momentum
            elif part.remote is not None and not self._is_plain:
                served[f"momentum.{number}"] = part.remote.fetch_momentum
            if part.sent is not None:
                passing[f"sent.{number}"] = part.sent
        means = self._means.state()
        counts = [[part.met_at for part in self._parts], means.counts]
        return State(counts, shared, means.copied, means.own, passing, served)

    def load(self, state: State, change: Change | None) -> None:
        met_at, reductions = state.counts
        super().load(state, change)
        self._means.load(replace(state, counts=reductions), change)
        for part, step in zip(self._parts, met_at, strict=True):
            part.met_at = step
        if change is None:
            self._assign_centre()
            self._send_momentum(state)

    def begin(self) -> None:
        with torch.no_grad():
            for part in self._parts:
                part.met_at = self.steps
                if part.begin is not None:
                    part.begin.copy_(part.bucket.params)
                if part.momentum is not None:
                    part.momentum.zero_()
        self._assign_centre()

    def _assign_centre(self) -> None:
        if self.setting.centre is not None:
            self.setting.centre.assign()

    def _send_momentum(self, state: State) -> None:
        """Send the servers the momentum of a checkpoint; the first worker does."""
        if self.workers.rank != 0 or self._is_plain:
            return
        for number, part in enumerate(self._parts):
            found = state.shared.get(f"momentum.{number}")
            if part.remote is not None and found is not None:
                part.remote.send_momentum(found)


class _TogetherFirst(AllReduce):
    """Averages gradients in the first steps, and then no longer."""

    def __init__(self, method: OuterSteps) -> None:
        super().__init__(method.workers)
        self._method = method
        self._first = replace(AllReduce.traits, may_be_local=True)
        self._later = replace(self._first, is_local=True)

    @property
    def traits(self) -> ExchangeTraits:  # type: ignore[override]
        return self._later if self._method.steps >= self._method.after else self._first


class LocalSteps(OuterSteps):
    """Average the models every H steps."""


class PostLocalSteps(OuterSteps):
    """The same, after first steps in lockstep."""


class BlockMomentum(OuterSteps):
    """Blockwise model-update filtering (Chen and Huo 2016)."""

    def __init__(self, setting: Setting) -> None:
        self._is_fairseq = setting.options.get("compat") == "fairseq"
        super().__init__(setting)

    @property
    def momentum(self) -> float:
        return self.setting.number("momentum", 1.0 - 1.0 / self.workers.size)

    @property
    def _is_plain(self) -> bool:
        return False  # the momentum follows the number of workers

    @property
    def _gain(self) -> float:
        return self.lr * (1.0 - self.momentum) if self._is_fairseq else self.lr

    def _advance(self, begin: torch.Tensor, change: torch.Tensor, momentum: torch.Tensor) -> None:
        if not self._is_fairseq:
            super()._advance(begin, change, momentum)
        else:  # the look-ahead stays in the values at which the next block begins
            begin.add_(momentum, alpha=1.0 + self.momentum if self.nesterov else 1.0)

    def _outer_settings(self) -> dict[str, Any]:
        if not self._is_fairseq:
            return super()._outer_settings()
        momentum = max(self.momentum, _LEAST_MOMENTUM)
        rate = self.lr * (1.0 + self.momentum if self.nesterov else 1.0)
        return outer_settings(lr=rate, momentum=momentum)


class DiLoCo(OuterSteps):
    """Distributed low-communication training (Douillard et al. 2023)."""
