"""Partial participation: in each step some of the workers count, the same ones on all workers.

    partial:0.5           a random half of the workers, drawn from a common seed: no message
    [select=round_robin]  they take turns instead
    [carry=yes]           what a worker computed and no step counted is added to what it sends next
    [skip_compute=yes]    workers that do not take part compute no gradients either

All workers update, with the mean over those that took part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.pace.allreduce import COMPOUND, AllReduce
from paceline.pace.exchange import Bucket, Exchange
from paceline.pace.method import Method, Setting
from paceline.runtime.work import Work
from paceline.state.protocol import State


class Partial(Method):
    """Chooses which workers take part."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.carried: list[torch.Tensor] = []
        self._share = setting.pace.value
        self._seed = int(setting.number("seed"))
        self._takes_turns = setting.options.get("select") == "round_robin"
        self._skips = setting.is_on("skip_compute")
        self.carries = setting.is_on("carry")
        if self._skips and self.carries:
            raise UsageError(
                f"pace {setting.pace}: a worker that skips computation (skip_compute=yes) has"
                " nothing to carry over; choose one of the two"
            )

    def describe(self) -> str:
        return f"{self.count} of {self.workers.size} workers in each step"

    @property
    def count(self) -> int:
        """How many take part: at least one."""
        return max(1, math.floor(self._share * self.workers.size + 0.5))

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that take part in the current step, by rank in the group."""
        size = self.workers.size
        if self._takes_turns:
            first = self.steps * self.count
            return tuple(sorted((first + i) % size for i in range(self.count)))
        chance = random.Random(f"{self._seed} {self.steps}")
        return tuple(sorted(chance.sample(range(size), self.count)))

    @property
    def is_member(self) -> bool:
        """Whether this worker takes part in the current step."""
        return self.workers.rank in self.members

    @property
    def skips_backward(self) -> bool:
        return self._skips and not self.is_member

    def exchange(self) -> Exchange:
        return _PartialAllReduce(self)

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        if self.carries:
            self.carried += [torch.zeros_like(bucket.grads) for bucket in buckets]

    def before_step(self) -> None:
        """Update what is carried over: here the step counts, so it happens once."""
        if not self.carries:
            return
        for bucket, carried in zip(self.buckets, self.carried, strict=True):
            if self.is_member:
                carried.zero_()
            else:
                carried.add_(bucket.grads)

    def state(self) -> State:
        """Return what is carried over, each worker's own: a newcomer starts with nothing."""
        return State(own={str(number): tensor for number, tensor in enumerate(self.carried)})


class _PartialAllReduce(AllReduce):
    """Averages over the workers that take part."""

    # Hidden are those of workers that do not take part; their gradients may be carried over.
    traits = replace(COMPOUND, hides_nonfinite=True)

    def __init__(self, method: Partial) -> None:
        super().__init__(method.workers)
        self._method = method
        self._sent: dict[int, torch.Tensor] = {}  # by bucket: what is sent instead of its gradients

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:  # noqa: ARG002
        method, factor = self._method, self._method.workers.size / self._method.count
        work = method.workers.all_reduce(
            self._contribution(bucket), "mean", out=bucket.averaged, async_op=True
        )
        assert isinstance(work, Work)
        return Work(work.handle, lambda: self._scaled(work, bucket, factor), keep=work)

    def _contribution(self, bucket: Bucket) -> torch.Tensor:
        method = self._method
        if method.is_member and not method.carries:
            return bucket.grads
        if bucket.index not in self._sent:
            size, dtype = bucket.grads.numel(), bucket.grads.dtype
            self._sent[bucket.index] = method.setting.allocate(size, dtype).zero_()
        sent = self._sent[bucket.index]
        if not method.is_member:
            return sent.zero_()
        place = next(i for i, other in enumerate(method.buckets) if other is bucket)
        return torch.add(bucket.grads, method.carried[place], out=sent)

    @staticmethod
    def _scaled(work: Work[Any], bucket: Bucket, factor: float) -> None:
        work.wait()
        if factor != 1.0:
            bucket.averaged.mul_(factor)
