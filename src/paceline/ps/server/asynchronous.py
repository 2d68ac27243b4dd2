"""Asynchronous updates: each worker's update is applied when it commits.

The update was computed from values that other workers may have changed since. The rule can correct
for that, or drop updates that are too old:

    lr=staleness      the learning rate of an update that is t >= 1 versions old is divided by t
    softsync n        with p workers, p // n updates are pooled and their mean is applied; with
                      lr=staleness each weighs 1 / t in it
    compensate=dc     DC-ASGD: the gradient g at the worker's values w is corrected towards the one
                      at today's values x, with g * g in place of the Hessian:
                      g + lambda * g * g * (x - w)

The last needs w, one copy of the values per worker: one copy per server would be the values of the
worker that read last. The settings of the param groups are those of the worker that sent the
update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from paceline.errors import UsageError
from paceline.ps.replication.messages import AsynchronousState
from paceline.ps.server import non_finite
from paceline.ps.server.optimizer import Settings
from paceline.ps.server.precision import Scratch
from paceline.ps.server.shard import Shard
from paceline.ps.server.worker_statistics import PushedGradient, WorkerRecords
from paceline.ps.spec import Rule, TableSpec

Outs = Callable[[int], torch.Tensor] | None  # by shard: where a worker wants its values


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
        """Keep a copy of the values that a worker reads."""
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
        """Return a worker's gradient, corrected; valid until the next shard's turn."""
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
        """Return which copies there are, by worker and shard."""
        return tuple(sorted(self._given))

    def restore(self, given: Sequence[tuple[int, int]]) -> None:
        """Allocate such copies."""
        for worker, number in given:
            self._given[worker, number] = torch.zeros_like(self._shards[number].params)

    def numbers(self, number: int) -> list[torch.Tensor]:
        """Return the copies of a shard's values, in order of workers."""
        return [self._given[key] for key in sorted(self._given) if key[1] == number]

    def forget(self, worker: int) -> None:
        """Drop the copies of a worker that left."""
        self._given = {key: kept for key, kept in self._given.items() if key[0] != worker}


class UpdatePool:
    """Adds up updates until there are enough for a version.

    Sums are kept here, not references: a worker begins its next step once it has committed.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._sums: dict[int, torch.Tensor] = {}  # by shard; memory that is used again
        self._absent: dict[int, frozenset[int]] = {}  # by shard that was pushed
        self._num_updates = 0
        self.settings: Settings = ()  # of the worker that committed last

    def __len__(self) -> int:
        """Return the number of pooled updates."""
        return self._num_updates

    def add(self, number: int, push: PushedGradient, divisor: float) -> None:
        """Add one shard of an update."""
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
        """Return what each pooled shard lacks, and the number of pooled updates."""
        return {n: tuple(sorted(lacks)) for n, lacks in self._absent.items()}, self._num_updates

    def restore(self, absent: Mapping[int, Sequence[int]], num_updates: int) -> None:
        """Allocate the sums of such updates."""
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

    def take(self) -> list[tuple[int, PushedGradient]]:
        """Return the mean of each pushed shard, and empty the pool."""
        means = [
            (number, PushedGradient(self._sums[number].div_(self._num_updates), absent))
            for number, absent in self._absent.items()
        ]
        self._absent.clear()
        self._num_updates = 0
        return means


class AsynchronousUpdates:
    """Applies what a worker pushed, at its commit."""

    def __init__(
        self, spec: TableSpec, shards: Sequence[Shard], records: WorkerRecords, scratch: Scratch
    ) -> None:
        self._spec = spec
        self._rule = spec.rule
        self._shards = shards
        self._records = records
        self._clocks = records.clocks
        self._pushes: dict[int, dict[int, PushedGradient]] = {}  # by worker, then by shard
        self._pool = UpdatePool(shards)
        self._compensation = DelayCompensation(self._rule, shards, scratch)

    def has_ended(self, _worker: int) -> bool:
        """Return whether a worker has ended the step that its clock is in: it counts at once."""
        return False

    def push(self, worker: int, number: int, push: PushedGradient) -> bool:
        """Remember a gradient until the worker commits."""
        self._pushes.setdefault(worker, {})[number] = push
        return True

    def ignores(self, _worker: int) -> bool:
        """Return False: whether an update counts is decided at its commit."""
        return False

    def commit(self, worker: int, outs: Outs = None) -> Collection[int]:
        """Apply what a worker pushed; return the shards whose fresh values are in `outs` now."""
        pushes = self._pushes.pop(worker, {})
        staleness = self._clocks.staleness(worker)
        if self._refuse(worker, pushes, staleness):
            return ()
        outs = outs if self._clocks.may_read_next(worker) else None
        try:
            if self._is_pooled():
                outs = None
                self._collect(worker, pushes, staleness)
            else:
                self._apply(worker, pushes, staleness, outs)
        except UsageError as error:
            text = f"table {self._spec.name!r}: {error}"
            self._records.end_step(worker, staleness=staleness, error="UsageError", text=text)
            return ()
        self._count(worker, staleness)
        self._records.end_step(worker, staleness=staleness)
        return pushes if outs is not None else ()

    def discard(self, worker: int) -> None:
        """Forget what a worker pushed for the step under way."""
        self._pushes.pop(worker, None)

    def pending(self, worker: int) -> dict[int, torch.Tensor]:
        """Return what a worker has pushed and not committed, by shard."""
        return {number: push.grad for number, push in self._pushes.get(worker, {}).items()}

    def renew(self, worker: int, number: int, grad: torch.Tensor) -> None:
        """Use this gradient instead of the one that a worker pushed."""
        pushes = self._pushes.get(worker, {})
        if number in pushes:
            pushes[number] = PushedGradient(grad, pushes[number].absent)

    def leave(self, worker: int) -> None:
        """Drop a worker, whose clock is removed already."""
        self.discard(worker)
        self._compensation.forget(worker)
        self._release_pool()

    def join(self, worker: int, left_at: int | None) -> int:
        """Add a worker; return the clock that it begins at: the slowest worker's, or its own."""
        self._clocks.join(worker, left_at)
        return self._clocks.clock(worker)

    def vacate(self, worker: int) -> None:
        """Keep the slot of a lost worker."""
        self.discard(worker)

    def may_read(self, worker: int) -> bool:
        """Return whether the clock rule lets a worker read."""
        return self._clocks.may_read(worker)

    def blockers(self, worker: int) -> tuple[int, ...]:
        """Return the workers that a worker waits for after its commit."""
        return self._clocks.blockers(worker)

    def push_blockers(self, _worker: int) -> tuple[int, ...]:
        """Return no worker: pushes do not wait."""
        return ()

    def on_read(self, worker: int, number: int) -> None:
        """Keep a copy of what a worker reads, if it is needed."""
        self._compensation.remember(worker, number)

    # -- for another copy ---------------------------------------------------------------------

    def outline(self) -> AsynchronousState:
        """Return everything but numbers and pushes."""
        pooled, num_pooled = self._pool.outline()
        settings = tuple(dict(group) for group in self._pool.settings)
        return AsynchronousState(self._compensation.outline(), pooled, num_pooled, settings)

    def restore(self, form: AsynchronousState) -> None:
        """Restore the state of another copy; pushes are pushed again."""
        self._compensation.restore(form.given)
        self._pool.restore(form.pooled, form.num_pooled)
        self._pool.settings = form.pool_settings

    def pushed(self) -> Iterator[tuple[int, int, PushedGradient]]:
        """Yield the pushed gradients that are still needed: worker, shard, gradient."""
        for worker, pushes in self._pushes.items():
            for number, push in pushes.items():
                yield worker, number, push

    def numbers(self, number: int, start: int, stop: int) -> list[torch.Tensor]:
        """Return views of the kept tensors of a range of a shard's elements."""
        kept = self._compensation.numbers(number) + self._pool.numbers(number)
        return [flat[start:stop] for flat in kept]

    # -- updates that are refused -------------------------------------------------------------

    def _refuse(self, worker: int, pushes: dict[int, PushedGradient], staleness: int) -> bool:
        most = self._rule.max_staleness
        if most is not None and staleness > most:
            self._records.statistics.dropped(worker)
            notice = f"dropped: {staleness} versions old, max_staleness={most}"
            self._records.end_step(worker, staleness=staleness, notice=notice)
            return True
        text = self._nonfinite(worker, pushes) if self._rule.nonfinite != "ignore" else ""
        if not text:
            return False
        self._records.statistics.skipped(worker)
        if self._rule.nonfinite == "raise":
            text = non_finite.advice(text)
            self._records.end_step(
                worker, staleness=staleness, error="NonFiniteGradient", text=text
            )
        else:
            self._records.end_step(
                worker, staleness=staleness, notice=f"{text}; its update is not applied"
            )
        return True

    def _nonfinite(self, worker: int, pushes: dict[int, PushedGradient]) -> str:
        for number, push in pushes.items():
            culprits = non_finite.culprits(self._spec.shards[number], {worker: push})
            if culprits:
                where = non_finite.describe(self._spec.shards[number], culprits)
                return f"table {self._spec.name!r}: {where}"
        return ""

    def _count(self, worker: int, staleness: int) -> None:
        self._records.statistics.updated(worker, staleness)
        if self._rule.push == "params" and staleness:
            self._records.statistics.overwritten(worker, staleness)

    # -- applying updates ---------------------------------------------------------------------

    def _apply(
        self, worker: int, pushes: dict[int, PushedGradient], staleness: int, outs: Outs
    ) -> None:
        self._clocks.applied([worker])
        settings, divisor = self._records.settings[worker], slowdown(self._rule, staleness)
        for number, push in pushes.items():
            grad = self._compensation.compensate(worker, number, push.grad, staleness)
            out = outs(number) if outs is not None else None
            self._update(number, PushedGradient(grad, push.absent), settings, divisor, out)

    def _update(
        self,
        number: int,
        push: PushedGradient,
        settings: Settings,
        divisor: float,
        out: torch.Tensor | None = None,
    ) -> None:
        self._shards[number].update(
            push.grad,
            absent=push.absent,
            settings=settings,
            slowdown=divisor,
            version=self._clocks.version,
            out=out,
        )

    # -- softsync: several updates make one version -------------------------------------------

    def _is_pooled(self) -> bool:
        return self._pool_size() > 1 or len(self._pool) > 0

    def _pool_size(self) -> int:
        num_groups = self._rule.softsync
        return max(1, len(self._clocks.workers) // num_groups) if num_groups else 1

    def _collect(self, worker: int, pushes: dict[int, PushedGradient], staleness: int) -> None:
        for number, push in pushes.items():
            grad = self._compensation.compensate(worker, number, push.grad, staleness)
            self._pool.add(
                number, PushedGradient(grad, push.absent), slowdown(self._rule, staleness)
            )
        self._pool.close(self._records.settings[worker])
        self._release_pool()

    def _release_pool(self) -> None:
        if not self._pool or len(self._pool) < self._pool_size():
            return
        self._clocks.applied(())
        for number, mean in self._pool.take():
            self._update(number, mean, self._pool.settings, divisor=1.0)
