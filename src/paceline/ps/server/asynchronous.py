"""The asynchronous way: each worker's update is applied when it commits.

The update was computed from values that others may have changed since. What is done about that is
in staleness_compensation.py; updates that are too old can be dropped whole. The settings of the
param groups are those of the worker whose update it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from paceline.errors import UsageError
from paceline.ps.replication.snapshot_format import ArrivalsForm
from paceline.ps.server import non_finite as health
from paceline.ps.server.optimizer import Settings
from paceline.ps.server.precision import Scratch
from paceline.ps.server.shard import Shard
from paceline.ps.server.staleness_compensation import DelayCompensation, Pool, slowdown
from paceline.ps.server.worker_clocks import Ledger, Push
from paceline.ps.spec import TableSpec

Outs = Callable[[int], torch.Tensor] | None  # by shard: where a worker wants its values


class Arrivals:
    """Applies what a worker pushed, at its commit."""

    def __init__(
        self, spec: TableSpec, shards: Sequence[Shard], ledger: Ledger, scratch: Scratch
    ) -> None:
        self._spec = spec
        self._rule = spec.rule
        self._shards = shards
        self._ledger = ledger
        self._clocks = ledger.clocks
        self._pushes: dict[int, dict[int, Push]] = {}  # by worker, then by shard
        self._pool = Pool(shards)
        self._compensation = DelayCompensation(self._rule, shards, scratch)

    def has_ended(self, _worker: int) -> bool:
        """Return whether a worker has ended the step that its clock is in: it counts at once."""
        return False

    def push(self, worker: int, number: int, push: Push) -> bool:
        """Remember a gradient until the worker commits."""
        self._pushes.setdefault(worker, {})[number] = push
        return True

    def ignores(self, _worker: int) -> bool:
        """Whether an update counts is seen at its commit."""
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
            self._ledger.end_step(worker, staleness=staleness, error="UsageError", text=text)
            return ()
        self._count(worker, staleness)
        self._ledger.end_step(worker, staleness=staleness)
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
            pushes[number] = Push(grad, pushes[number].absent)

    def leave(self, worker: int) -> None:
        """Go on without a worker, whose clock is gone already."""
        self.discard(worker)
        self._compensation.forget(worker)
        self._release_pool()

    def join(self, worker: int, left_at: int | None) -> int:
        """Take in a worker; return the clock that it begins at: the slowest one's, or its own."""
        self._clocks.join(worker, left_at)
        return self._clocks.clock(worker)

    def vacate(self, worker: int) -> None:
        """Keep the place of a worker that is gone."""
        self.discard(worker)

    def may_read(self, worker: int) -> bool:
        """Say whether the clock rule lets a worker read."""
        return self._clocks.may_read(worker)

    def blockers(self, worker: int) -> tuple[int, ...]:
        """Name the workers whom a worker that has committed waits for."""
        return self._clocks.blockers(worker)

    def push_blockers(self, _worker: int) -> tuple[int, ...]:
        """Nobody waits with a push."""
        return ()

    def on_read(self, worker: int, number: int) -> None:
        """Remember what a worker was given."""
        self._compensation.remember(worker, number)

    # -- for another copy ---------------------------------------------------------------------

    def outline(self) -> ArrivalsForm:
        """Return everything but numbers and pushes."""
        pooled, num_pooled = self._pool.outline()
        settings = tuple(dict(group) for group in self._pool.settings)
        return ArrivalsForm(self._compensation.outline(), pooled, num_pooled, settings)

    def restore(self, form: ArrivalsForm) -> None:
        """Take over from another copy; pushes are pushed again."""
        self._compensation.restore(form.given)
        self._pool.restore(form.pooled, form.num_pooled)
        self._pool.settings = form.pool_settings

    def pushed(self) -> Iterator[tuple[int, int, Push]]:
        """Yield what is needed of what was pushed: worker, shard, gradient."""
        for worker, pushes in self._pushes.items():
            for number, push in pushes.items():
                yield worker, number, push

    def numbers(self, number: int, start: int, stop: int) -> list[torch.Tensor]:
        """Return what is kept about a range of a shard's elements, where it lies."""
        kept = self._compensation.numbers(number) + self._pool.numbers(number)
        return [flat[start:stop] for flat in kept]

    # -- updates that do not count ------------------------------------------------------------

    def _refuse(self, worker: int, pushes: dict[int, Push], staleness: int) -> bool:
        most = self._rule.max_staleness
        if most is not None and staleness > most:
            self._ledger.accounts.dropped(worker)
            notice = f"dropped: {staleness} versions old, max_staleness={most}"
            self._ledger.end_step(worker, staleness=staleness, notice=notice)
            return True
        text = self._nonfinite(worker, pushes) if self._rule.nonfinite != "ignore" else ""
        if not text:
            return False
        self._ledger.accounts.skipped(worker)
        if self._rule.nonfinite == "raise":
            text = health.advice(text)
            self._ledger.end_step(worker, staleness=staleness, error="NonFiniteGradient", text=text)
        else:
            self._ledger.end_step(
                worker, staleness=staleness, notice=f"{text}; its update is not applied"
            )
        return True

    def _nonfinite(self, worker: int, pushes: dict[int, Push]) -> str:
        for number, push in pushes.items():
            culprits = health.culprits(self._spec.shards[number], {worker: push})
            if culprits:
                where = health.describe(self._spec.shards[number], culprits)
                return f"table {self._spec.name!r}: {where}"
        return ""

    def _count(self, worker: int, staleness: int) -> None:
        self._ledger.accounts.updated(worker, staleness)
        if self._rule.push == "params" and staleness:
            self._ledger.accounts.overwritten(worker, staleness)

    # -- updates that do ----------------------------------------------------------------------

    def _apply(self, worker: int, pushes: dict[int, Push], staleness: int, outs: Outs) -> None:
        self._clocks.applied([worker])
        settings, divisor = self._ledger.settings[worker], slowdown(self._rule, staleness)
        for number, push in pushes.items():
            grad = self._compensation.compensate(worker, number, push.grad, staleness)
            out = outs(number) if outs is not None else None
            self._update(number, Push(grad, push.absent), settings, divisor, out)

    def _update(
        self,
        number: int,
        push: Push,
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

    def _collect(self, worker: int, pushes: dict[int, Push], staleness: int) -> None:
        for number, push in pushes.items():
            grad = self._compensation.compensate(worker, number, push.grad, staleness)
            self._pool.add(number, Push(grad, push.absent), slowdown(self._rule, staleness))
        self._pool.close(self._ledger.settings[worker])
        self._release_pool()

    def _release_pool(self) -> None:
        if not self._pool or len(self._pool) < self._pool_size():
            return
        self._clocks.applied(())
        for number, mean in self._pool.take():
            self._update(number, mean, self._pool.settings, divisor=1.0)
