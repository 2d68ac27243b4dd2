"""What can be done about updates that were computed from old values.

    lr=staleness      the learning rate of an update that is t >= 1 versions old is divided by t
    softsync n        with p workers, p // n updates are pooled and their mean is applied; with
                      lr=staleness each weighs 1 / t in it
    compensate=dc     DC-ASGD: the gradient g at the worker's values w is corrected towards the one
                      at today's values x, with g * g in place of the Hessian:
                      g + lambda * g * g * (x - w)

The last needs w, one copy of the values per worker: with one per server it would be the values of
whoever read last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.ps.server.optimizer import Settings
from paceline.ps.server.precision import Scratch
from paceline.ps.server.shard import Shard
from paceline.ps.server.worker_clocks import Push
from paceline.ps.spec import Rule


def slowdown(rule: Rule, staleness: int) -> float:
    """Return what the learning rate of an update is divided by."""
    return float(max(1, staleness)) if rule.lr == "staleness" else 1.0


class DelayCompensation:
    """Corrects gradients to first order, if the rule asks for it."""

    def __init__(self, rule: Rule, shards: Sequence[Shard], scratch: Scratch) -> None:
        self._strength = rule.dc_lambda if rule.compensate == "dc" else 0.0
        self._shards = shards
        self._scratch = scratch
        self._given: dict[tuple[int, int], torch.Tensor] = {}  # by worker and shard

    def remember(self, worker: int, number: int) -> None:
        """Keep the values that a worker is given."""
        if self._strength == 0.0:
            return
        params = self._shards[number].params
        kept = self._given.get((worker, number))
        if kept is None:
            kept = self._given[worker, number] = torch.empty_like(params)
        kept.copy_(params)

    def compensate(
        self, worker: int, number: int, grad: torch.Tensor, staleness: int
    ) -> torch.Tensor:
        """Return a worker's gradient as it would be now; valid until the next shard's turn."""
        given = self._given.get((worker, number))
        if given is None or staleness == 0:
            return grad
        shard = self._shards[number]
        grad = shard.computable(grad)
        moved = self._scratch.flat("compensated", grad.numel(), shard.dtype)
        torch.sub(shard.values(), given, out=moved)
        moved.mul_(grad)
        return torch.addcmul(grad, moved, grad, value=self._strength, out=moved)

    def outline(self) -> tuple[tuple[int, int], ...]:
        """Name the copies, by worker and shard."""
        return tuple(sorted(self._given))

    def restore(self, given: Sequence[tuple[int, int]]) -> None:
        """Make room for such copies."""
        for worker, number in given:
            self._given[worker, number] = torch.zeros_like(self._shards[number].params)

    def numbers(self, number: int) -> list[torch.Tensor]:
        """Return the copies of a shard's values, in order of workers."""
        return [self._given[key] for key in sorted(self._given) if key[1] == number]

    def forget(self, worker: int) -> None:
        """Drop the copies of a worker that left."""
        self._given = {key: kept for key, kept in self._given.items() if key[0] != worker}


class Pool:
    """Adds up updates until there are enough for a version.

    Sums are kept here, not references: a worker goes on with its step once it has committed.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._sums: dict[int, torch.Tensor] = {}  # by shard; memory that is used again
        self._absent: dict[int, frozenset[int]] = {}  # by shard that was pushed
        self._num_updates = 0
        self.settings: Settings = ()  # of whoever committed last

    def __len__(self) -> int:
        """Return how many updates are in."""
        return self._num_updates

    def add(self, number: int, push: Push, divisor: float) -> None:
        """Take one shard of an update."""
        shard = self._shards[number]
        grad = shard.computable(push.grad)
        if number not in self._sums:
            self._sums[number] = torch.empty(shard.spec.count, dtype=shard.dtype)
        if number in self._absent:
            self._sums[number].add_(grad, alpha=1.0 / divisor)
            self._absent[number] &= push.absent
        else:
            torch.div(grad, divisor, out=self._sums[number])
            self._absent[number] = push.absent

    def outline(self) -> tuple[dict[int, tuple[int, ...]], int]:
        """Return what was pushed, by shard, and how many updates are in."""
        return {n: tuple(sorted(lacks)) for n, lacks in self._absent.items()}, self._num_updates

    def restore(self, absent: Mapping[int, Sequence[int]], num_updates: int) -> None:
        """Make room for such updates."""
        for number, lacks in absent.items():
            shard = self._shards[number]
            self._sums[number] = torch.zeros(shard.spec.count, dtype=shard.dtype)
            self._absent[number] = frozenset(lacks)
        self._num_updates = num_updates

    def numbers(self, number: int) -> list[torch.Tensor]:
        """Return the sum of a shard's updates, if there is one."""
        return [self._sums[number]] if number in self._absent else []

    def close(self, settings: Settings) -> None:
        """End an update."""
        self._num_updates += 1
        self.settings = settings

    def take(self) -> list[tuple[int, Push]]:
        """Return the mean of each shard that was pushed, and begin anew."""
        means = [
            (number, Push(self._sums[number].div_(self._num_updates), absent))
            for number, absent in self._absent.items()
        ]
        self._absent.clear()
        self._num_updates = 0
        return means
