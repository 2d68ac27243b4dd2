"""Elastic averaging (Zhang, Choromanska, LeCun 2015): a spring between each worker and a centre.

Every T steps, with the values x_i at the beginning of that step and the centre c:

    x_i <- x_i - alpha (x_i - c)          behind the worker's own step
    c   <- c + beta (mean of x_i - c)

The workers explore on their own and are pulled back; what is evaluated and saved is the centre.
Defaults: beta 0.9, alpha = beta / number of workers (at least 2). EAMSGD is the same with Nesterov
momentum in the workers' steps, which torch's SGD has: the parameters that the script sees are the
look-ahead. The centre is replicated: every worker computes the same from the same mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.errors import UsageError
from paceline.pace.exchange import Bucket
from paceline.pace.method import Method, Setting
from paceline.work import Work


@dataclass
class _Part:
    bucket: Bucket
    centre: torch.Tensor
    before: torch.Tensor  # the values at the beginning of the step
    mean: torch.Tensor


class ElasticAveraging(Method):
    """Synchronous, with a replicated centre."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.every = int(setting.pace.value)
        self.beta = setting.number("beta", 0.9)
        self._parts: list[_Part] = []
        if self.alpha >= 1 or self.beta > 1:
            raise UsageError(
                f"pace {setting.pace}: alpha={self.alpha:g}, beta={self.beta:g}; expected alpha < 1"
                " and beta <= 1, or the springs throw workers beyond the centre"
            )

    @property
    def alpha(self) -> float:
        """How far a worker is pulled towards the centre."""
        return self.setting.number("alpha", self.beta / max(2, self.workers.size))

    def describe(self) -> str:
        return f"every {self.every} steps, alpha {self.alpha:.3g}, beta {self.beta:g}"

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        for bucket in buckets:
            size, dtype = bucket.params.numel(), bucket.params.dtype
            centre, before = bucket.params.clone(), self.setting.allocate(size, dtype)
            self._parts.append(_Part(bucket, centre, before, self.setting.allocate(size, dtype)))

    @property
    def is_due(self) -> bool:
        return bool(self._parts) and self.steps >= (self.rounds + 1) * self.every

    def before_step(self) -> None:
        if self.steps + 1 >= (self.rounds + 1) * self.every:
            for part in self._parts:
                part.before.copy_(part.bucket.params)

    def meet(self) -> None:
        works = [
            self.workers.all_reduce(part.before, "mean", out=part.mean, async_op=True)
            for part in self._parts
        ]
        for work in works:
            assert isinstance(work, Work)
            work.wait()

    def conclude(self) -> None:
        with torch.no_grad():
            for part in self._parts:
                pull = part.before.sub_(part.centre)
                part.bucket.params.sub_(pull, alpha=self.alpha)
                part.centre.lerp_(part.mean, self.beta)

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        return next(part.centre.clone() for part in self._parts if part.bucket is bucket)

    def kept(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield part.centre
            yield part.before


class ElasticAveragingWithMomentum(ElasticAveraging):
    """The same; the workers' SGD gets Nesterov momentum if it has none."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        optimizer, momentum = setting.optimizer(), setting.number("momentum", 0.9)
        if not isinstance(optimizer, torch.optim.SGD):
            raise UsageError(
                f"pace {setting.pace} gives SGD a momentum, and the optimizer is"
                f" {type(optimizer).__name__}; use torch.optim.SGD, or pace easgd"
            )
        for group in optimizer.param_groups:
            if not group["momentum"]:
                group.update(momentum=momentum, nesterov=True, dampening=0.0)
