"""Elastic averaging (Zhang, Choromanska, LeCun 2015): a spring between each worker and a center.

Every T steps, with the values x_i at the beginning of that step and the center variable c:

    x_i <- x_i - alpha (x_i - c)          after the worker's own step
    c   <- c + beta (mean of x_i - c)

The workers explore on their own and are pulled back; the center variable is evaluated and saved.
Defaults: beta 0.9, alpha = beta / number of workers (at least 2). EAMSGD is the same with Nesterov
momentum in the workers' steps, which torch's SGD has: the parameters that the script sees are the
look-ahead. Without servers the center variable is replicated: every worker computes the same from
the same mean. With servers it is on the servers (center.py).

FREE-RUNNING (mode=async, which needs servers): each worker by itself, every T of its own steps. At
the beginning of such a step it reads c and adds d to it; after the step it subtracts d from x_i:

    d = alpha (x_i - c);   c <- c + d;   x_i <- x_i - d

The same d on both sides, whatever other workers do to c between the read and the addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.pace.center import Centre, CentreTable, outer_settings
from paceline.pace.exchange import Bucket
from paceline.pace.method import Method, Setting
from paceline.runtime.work import Together, Work
from paceline.state.protocol import Change, State


@dataclass
class _ElasticBucket:
    bucket: Bucket
    centre: torch.Tensor
    before: torch.Tensor  # the values at the beginning of the step
    mean: torch.Tensor | None  # None: on the servers
    remote: CentreTable | None = None


class ElasticAveraging(Method):
    """The center variable is replicated or on the servers; there workers may be free-running."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.every = int(setting.pace.value)
        self.beta = setting.number("beta")
        self._parts: list[_ElasticBucket] = []
        self.is_free = setting.options.get("mode") == "async" and setting.centre is not None
        if self.alpha >= 1 or self.beta > 1:
            raise UsageError(
                f"pace {setting.pace}: alpha={self.alpha:g}, beta={self.beta:g}; expected alpha < 1"
                " and beta <= 1, or the springs throw workers beyond the centre"
            )

    @property
    def alpha(self) -> float:
        """How far a worker is pulled towards the center."""
        return self.setting.number("alpha", self.beta / max(2, self.workers.size))

    def describe(self) -> str:
        words = f"every {self.every} steps, alpha {self.alpha:.3g}"
        return f"{words}, each by itself" if self.is_free else f"{words}, beta {self.beta:g}"

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        for bucket in buckets:
            size, dtype = bucket.params.numel(), bucket.params.dtype
            before = self.setting.allocate(size, dtype)
            if self.setting.centre is not None:
                remote = self.setting.centre.add_bucket(bucket, is_free=self.is_free)
                self._parts.append(_ElasticBucket(bucket, remote.values, before, None, remote))
                continue
            mean = self.setting.allocate(size, dtype)
            self._parts.append(_ElasticBucket(bucket, bucket.params.clone(), before, mean))

    def _outer_settings(self) -> dict[str, Any]:
        return outer_settings(lr=self.beta)

    @property
    def is_due(self) -> bool:
        is_time = bool(self._parts) and self.steps >= (self.rounds + 1) * self.every
        return is_time and not self.is_free

    def before_step(self) -> None:
        if self.steps + 1 < (self.rounds + 1) * self.every:
            return
        for part in self._parts:
            if self.is_free:
                self._give(part)
            else:
                part.before.copy_(part.bucket.params)

    def run_round(self) -> None:
        if self.setting.centre is not None:
            self._meet_on_servers(self.setting.centre)
            return
        works = [
            self.workers.all_reduce(part.before, "mean", out=part.mean, async_op=True)
            for part in self._parts
        ]
        for work in works:
            assert isinstance(work, Work)
            work.wait()

    def apply_round(self) -> None:
        with torch.no_grad():
            for part in self._parts:
                if part.remote is not None:  # its outbox has the old center values minus these
                    part.bucket.params.add_(part.remote.outbox, alpha=self.alpha)
                    part.remote.begin_next_step()
                    continue
                assert part.mean is not None
                pull = part.before.sub_(part.centre)
                part.bucket.params.sub_(pull, alpha=self.alpha)
                part.centre.lerp_(part.mean, self.beta)

    def _meet_on_servers(self, centre: Centre) -> None:
        tables = [part.remote for part in self._parts if part.remote is not None]
        fresh = [part for part in self._parts if part.remote and not part.remote.is_committed]
        Together([part.remote.push(part.before) for part in fresh if part.remote]).wait()
        centre.commit(tables, self._outer_settings())

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        part = next(part for part in self._parts if part.bucket is bucket)
        if self.is_free and part.remote is not None:
            self.workers.barrier()  # no worker adds any more
            part.remote.pull()
            self.workers.barrier()  # no worker adds again before all have read
        return part.centre.clone()

    # -- free-running -------------------------------------------------------------------------

    def _give(self, part: _ElasticBucket) -> None:
        """Move the center values towards this worker's."""
        assert part.remote is not None
        part.remote.pull()
        difference = torch.sub(part.bucket.params, part.centre, out=part.before)
        part.remote.add(difference.mul_(self.alpha))

    def after_step(self) -> None:
        """Move this worker's values towards the center, by as much."""
        if not self.is_free or self.steps < (self.rounds + 1) * self.every:
            return
        with torch.no_grad():
            for part in self._parts:
                part.bucket.params.sub_(part.before)
        self.rounds += 1

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        shared, passing = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for number, part in enumerate(self._parts):
            shared[f"centre.{number}"], passing[f"before.{number}"] = part.centre, part.before
        return State(shared=shared, passing=passing)

    def load(self, state: State, change: Change | None) -> None:
        super().load(state, change)
        if change is None:
            self._assign_centre()

    def resume(self, change: Change) -> None:
        """Start a newcomer of a free-running job from the center values."""
        if self.is_free and change.is_new(self.workers.ranks[self.workers.rank]):
            for part in self._parts:
                part.bucket.params.copy_(part.centre)

    def begin(self) -> None:
        with torch.no_grad():
            for part in self._parts:
                part.centre.copy_(part.bucket.params)
        self._assign_centre()

    def _assign_centre(self) -> None:
        if self.setting.centre is not None:
            self.setting.centre.assign()


class ElasticAveragingWithMomentum(ElasticAveraging):
    """The same; the workers' SGD gets Nesterov momentum if it has none."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        optimizer, momentum = setting.optimizer(), setting.number("momentum")
        if not isinstance(optimizer, torch.optim.SGD):
            raise UsageError(
                f"pace {setting.pace} gives SGD a momentum, and the optimizer is"
                f" {type(optimizer).__name__}; use torch.optim.SGD, or pace easgd"
            )
        for group in optimizer.param_groups:
            if not group["momentum"]:
                group.update(momentum=momentum, nesterov=True, dampening=0.0)
