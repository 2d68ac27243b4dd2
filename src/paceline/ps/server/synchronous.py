"""Synchronous updates: the workers' mean is applied, once per step.

A shard is REDUCED once every live worker has pushed it: workers may then read, clip and replace the
average. When all have committed, the optimizer runs once. What a worker pushed before it left
counts only in known averages.

The first worker is the SPEAKER: all workers clip the same averages in the same way, and the speaker
sends the result. If it leaves between an average and its commit, the server cannot know how the
averages were changed: that step is skipped. In an elastic job all workers send their (equal)
results, so that nothing depends on one worker.

A script may skip steps (a GradScaler does, at an infinite gradient): its workers then push the same
step again, which restarts the shard. A worker that JOINS takes part at once, also in a step that is
under way: shards that are averaged already do without it, and it only gets the reply. (If it began
with the next step, it would begin with a different one on each server, for a step does not begin
everywhere at once.) A lost worker's slot may also stay VACANT until a replacement repeats the step:
pushes that are in an average already, and the commit, are then not counted again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from paceline.errors import UsageError
from paceline.ps.replication.messages import SynchronousState
from paceline.ps.server import non_finite
from paceline.ps.server.precision import Scratch
from paceline.ps.server.shard import Shard
from paceline.ps.server.worker_statistics import PushedGradient, WorkerRecords
from paceline.ps.spec import TableSpec


class SynchronousUpdates:
    """Averages what the workers push, and applies the average when all have committed."""

    def __init__(
        self, spec: TableSpec, shards: Sequence[Shard], records: WorkerRecords, _scratch: Scratch
    ) -> None:
        self._spec = spec
        self._shards = shards
        self._records = records
        self._clocks = records.clocks
        self._pushes: list[dict[int, PushedGradient]] = [{} for _ in shards]
        self._means: list[PushedGradient | None] = [
            None for _ in shards
        ]  # kept until the next push
        self._committed: set[int] = set()
        self._problems: dict[int, str] = {}  # by shard: why the step must not be applied
        self._notices: dict[int, str] = {}  # by shard: what was left out of its average
        self._orphaned = ""  # why the step cannot be applied: its speaker has left
        # (worker, shard): its next push is too late, or a repetition.
        self._counted: set[tuple[int, int]] = set()
        self._inherited: set[int] = set()  # workers whose commit a replacement will repeat
        self._ended: dict[int, tuple[tuple[int, ...], str]] = {}  # by shard: see `last_average`
        self._last_clock = 0  # of the step that ended last

    # -- a step -------------------------------------------------------------------------------

    def has_ended(self, worker: int) -> bool:
        """Return whether a worker has ended the step that its clock is in."""
        return worker in self._committed and worker not in self._inherited

    def push(self, worker: int, number: int, push: PushedGradient) -> bool:
        """Add a worker's gradient to an average; true: the worker waits for the average."""
        if (worker, number) in self._counted:
            self._counted.discard((worker, number))
            return True
        if self._means[number] is not None:
            self._begin_anew(worker, number)
        grad = self._shards[number].widened(worker, push.grad)
        self._pushes[number][worker] = PushedGradient(grad, push.absent)
        self._reduce_if_complete(number)
        return True

    def ignores(self, _worker: int) -> bool:
        """Return whether a worker's step does not count; here all steps do."""
        return False

    def commit(self, worker: int, _outs: object = None) -> Collection[int]:
        """Note that a worker ended its step; the last one's commit applies it.

        No values are copied on the way: they go to all workers, or are shared.
        """
        self._committed.add(worker)
        self._inherited.discard(worker)
        self._end_if_complete()
        return ()

    def discard(self, worker: int) -> None:
        """Forget what a worker pushed for the step under way, unless it is in an average."""
        for number, pushes in enumerate(self._pushes):
            if self._means[number] is None:
                pushes.pop(worker, None)

    def pending(self, _worker: int) -> dict[int, torch.Tensor]:
        """Return nothing: averages are made when gradients are pushed, not at the commit."""
        return {}

    def renew(self, _worker: int, _number: int, _grad: torch.Tensor) -> None:
        """Do nothing: averages are made of what was pushed."""

    def leave(self, worker: int) -> None:
        """Drop a worker, whose clock is removed already."""
        if self._is_speaker_needed(worker):
            self._orphaned = f"worker {worker}, which sent the changes to gradients, is gone"
        self.discard(worker)
        self._committed.discard(worker)
        self._records.stopping.discard(worker)
        self._forget_repeats(worker)
        for shard in self._shards:
            shard.forget(worker)
        if self._clocks.workers:
            for number in range(len(self._shards)):
                self._reduce_if_complete(number)
            self._end_if_complete()
        else:
            self._begin_step()  # for workers that join

    # -- workers that join --------------------------------------------------------------------

    def join(self, worker: int, _left_at: int | None) -> int:
        """Add a worker; return the clock of the last step that ended without it."""
        workers = self._clocks.workers
        clock = self._clocks.clock(workers[0]) if workers else self._last_clock
        self._clocks.join(worker, clock)
        for number, pushes in enumerate(self._pushes):
            if self._means[number] is not None and pushes:
                self._counted.add((worker, number))
        return clock

    def vacate(self, worker: int) -> None:
        """Keep the slot of a lost worker; a replacement will repeat what counts of its step."""
        self.discard(worker)
        for number, pushes in enumerate(self._pushes):
            if worker in pushes:  # and in an average
                self._counted.add((worker, number))
        if worker in self._committed:
            self._inherited.add(worker)

    def last_average(self, number: int) -> tuple[tuple[int, ...], str]:
        """Return what all lacked in the last step that ended, and its problem."""
        return self._ended.get(number, ((), ""))

    def _forget_repeats(self, worker: int) -> None:
        self._counted = {one for one in self._counted if one[0] != worker}
        self._inherited.discard(worker)

    def _is_speaker_needed(self, worker: int) -> bool:
        if self._spec.rule.all_speak:
            return False
        was_first = all(worker < other for other in self._clocks.workers)
        has_averages = any(
            mean is not None and pushes
            for mean, pushes in zip(self._means, self._pushes, strict=True)
        )
        return was_first and worker not in self._committed and has_averages

    def may_read(self, worker: int) -> bool:
        """Return whether a worker's last step was applied."""
        return worker not in self._committed

    def blockers(self, worker: int) -> tuple[int, ...]:
        """Return the workers whose commits a worker that has committed waits for."""
        if worker not in self._committed:
            return ()
        return tuple(other for other in self._clocks.workers if other not in self._committed)

    def push_blockers(self, worker: int) -> tuple[int, ...]:
        """Return the workers whose pushes a worker that has pushed everything waits for."""
        if all(mean is not None for mean in self._means) or not self._has_pushed(worker):
            return ()
        return tuple(other for other in self._clocks.workers if not self._has_pushed(other))

    def _has_pushed(self, worker: int) -> bool:
        return all(worker in pushes for pushes in self._pushes)

    def on_read(self, _worker: int, _number: int) -> None:
        """Do nothing: no worker computes from old values."""

    # -- for another copy ---------------------------------------------------------------------

    def outline(self) -> SynchronousState:
        """Return everything but numbers and pushes."""
        known = tuple(
            (number, _sorted(mean.absent), {w: _sorted(p.absent) for w, p in pushes.items()})
            for number, (mean, pushes) in enumerate(zip(self._means, self._pushes, strict=True))
            if mean is not None
        )
        return SynchronousState(
            known,
            _sorted(self._committed),
            self._problems,
            self._notices,
            self._orphaned,
            tuple(sorted(self._counted)),
            _sorted(self._inherited),
            self._ended,
            self._last_clock,
        )

    def restore(self, form: SynchronousState) -> None:
        """Restore the state of another copy; pushes that are not in an average are pushed again."""
        for number, absent, pushes in form.known:
            average = self._shards[number].average
            assert average is not None
            self._means[number] = PushedGradient(average, frozenset(absent))
            for worker, lacks in pushes.items():  # only the contributors are needed by now
                self._pushes[number][worker] = PushedGradient(average, frozenset(lacks))
        self._committed = set(form.committed)
        self._problems, self._notices = dict(form.problems), dict(form.notices)
        self._orphaned, self._counted = form.orphaned, set(form.counted)
        self._inherited, self._ended = set(form.inherited), dict(form.ended)
        self._last_clock = form.last_clock

    def pushed(self) -> Iterator[tuple[int, int, PushedGradient]]:
        """Yield the pushed gradients that are still needed: worker, shard, gradient."""
        for number, pushes in enumerate(self._pushes):
            if self._means[number] is None:
                for worker, push in pushes.items():
                    yield worker, number, push

    def replaced(self) -> Iterator[tuple[int, PushedGradient]]:
        """Yield the gradients that replaced averages in the step under way, by shard."""
        for number, mean in enumerate(self._means):
            if self._pushes[number] and mean and mean.grad is not self._shards[number].average:
                yield number, mean

    def numbers(self, _number: int, _start: int, _stop: int) -> list[torch.Tensor]:
        """Return nothing: the averages are the shards' own."""
        return []

    # -- averages -----------------------------------------------------------------------------

    def mean(self, number: int) -> PushedGradient | None:
        """Return a shard's average if it is known."""
        return self._means[number]

    def problem(self, number: int) -> str:
        """Return why the step must not be applied, as far as one shard is concerned."""
        return self._problems.get(number, "")

    def replace(self, number: int, push: PushedGradient) -> None:
        """Use this gradient instead of the average, which workers may still read."""
        if self._means[number] is None or not self._pushes[number]:
            raise UsageError(
                f"table {self._spec.name!r}, shard {self._spec.shards[number].label!r}: there is no"
                " average to replace; all workers must push first"
            )
        self._means[number] = push

    def _begin_anew(self, worker: int, number: int) -> None:
        if self._committed and self._pushes[number]:
            raise UsageError(
                f"worker {worker} pushes shard {self._spec.shards[number].label!r} of table"
                f" {self._spec.name!r} again, but workers {sorted(self._committed)} have ended the"
                " step with the average: skip a step on all workers or on none"
            )
        self._means[number] = None
        self._pushes[number].clear()
        self._counted = {one for one in self._counted if one[1] != number}
        self._problems.pop(number, None)
        self._notices.pop(number, None)
        self._orphaned = ""

    def _reduce_if_complete(self, number: int) -> None:
        if self._means[number] is not None:
            return
        workers, pushes = self._contributors(number), self._pushes[number]
        if workers:  # in the order of ranks, which is also that of the collectives
            self._means[number] = self._average(number, {w: pushes[w] for w in workers})

    def _contributors(self, number: int) -> Sequence[int]:
        """Return the workers whose gradients make a shard's average; none: some are missing."""
        workers, pushes = self._clocks.workers, self._pushes[number]
        return workers if all(worker in pushes for worker in workers) else ()

    def _average(self, number: int, pushes: dict[int, PushedGradient]) -> PushedGradient:
        mean = self._mean_of(number, pushes)
        spec = self._spec.shards[number]
        if self._spec.rule.nonfinite == "ignore" or not non_finite.bad_parameters(spec, mean):
            return mean
        culprits = non_finite.culprits(spec, pushes)
        sound = {worker: push for worker, push in pushes.items() if worker not in culprits}
        text = non_finite.describe(spec, culprits)
        if self._spec.rule.nonfinite != "quarantine" or not culprits or not sound:
            self._problems[number] = text
            return mean
        for worker in culprits:
            self._records.statistics.skipped(worker)
        self._notices[number] = f"{text}; it is left out of the average"
        return self._mean_of(number, sound)

    def _mean_of(self, number: int, pushes: dict[int, PushedGradient]) -> PushedGradient:
        shard, grads = self._shards[number], [push.grad for push in pushes.values()]
        votes = self._spec.rule.votes
        average = shard.elect(grads, self._last_clock) if votes else shard.reduce(grads)
        return PushedGradient(
            average, frozenset.intersection(*(push.absent for push in pushes.values()))
        )

    # -- the end of a step --------------------------------------------------------------------

    def _end_if_complete(self) -> None:
        workers = self._enders()
        if not workers:
            return
        missing = self._missing()
        if missing:
            self._end(workers, error="UsageError", text=missing)
        elif self._problems:
            self._refuse(workers)
        elif self._orphaned:
            text = f"table {self._spec.name!r}: {self._orphaned}; the step is left out"
            self._end(workers, notice=text)
        else:
            self._apply(workers)

    def _enders(self) -> Sequence[int]:
        """Return the workers whose step ends now; none: some have not committed."""
        workers = self._clocks.workers
        if not self._committed or not all(worker in self._committed for worker in workers):
            return ()
        return workers

    def _leader(self) -> int:
        return self._clocks.workers[0]  # a scheduler sets the same on all

    def _missing(self) -> str:
        for number, pushes in enumerate(self._pushes):
            if pushes and self._means[number] is None:
                lacking = [w for w in self._clocks.workers if w not in pushes]
                return (
                    f"table {self._spec.name!r}: workers {lacking} ended their step without pushing"
                    f" shard {self._spec.shards[number].label!r}, which workers {sorted(pushes)}"
                    " pushed; every worker must push the same shards in a step"
                )
        return ""

    def _refuse(self, workers: Collection[int]) -> None:
        """End a step without applying it, because gradients are not finite."""
        text = f"table {self._spec.name!r}: {'; '.join(self._problems.values())}"
        for worker in workers:
            self._records.statistics.skipped(worker)
        if self._spec.rule.nonfinite == "raise":
            self._end(workers, error="NonFiniteGradient", text=non_finite.advice(text))
        else:
            self._end(workers, notice=f"{text}; the step is left out")

    def _apply(self, workers: Sequence[int]) -> None:
        self._count(workers)
        try:
            for number, mean in enumerate(self._means):
                if mean is not None and self._pushes[number]:
                    self._update(self._shards[number], mean)
        except UsageError as error:
            self._end(workers, error="UsageError", text=f"table {self._spec.name!r}: {error}")
        else:
            self._end(workers, notice="; ".join(self._notices.values()))

    def _count(self, workers: Sequence[int]) -> None:
        """Count a version, and the updates that are in it."""
        staleness = self._clocks.applied(workers)
        for worker in workers:
            self._records.statistics.updated(worker, staleness[worker])

    def _update(self, shard: Shard, mean: PushedGradient) -> None:
        shard.update(
            mean.grad,
            absent=mean.absent,
            settings=self._records.settings[self._leader()],
            slowdown=1.0,
            version=self._clocks.version,
        )

    def _end(
        self, workers: Collection[int], *, notice: str = "", error: str = "", text: str = ""
    ) -> None:
        for number, mean in enumerate(self._means):
            if mean is not None and self._pushes[number]:
                self._ended[number] = (tuple(sorted(mean.absent)), self.problem(number))
        stops = bool(self._records.stopping)
        self._records.stopping.clear()
        for worker in workers:
            self._records.end_step(worker, notice=notice, error=error, text=text, stops=stops)
            self._last_clock = self._clocks.clock(worker)
        self._begin_step()

    def _begin_step(self) -> None:
        begun = (self._committed, self._problems, self._notices, self._counted, self._inherited)
        for memory in begun:
            memory.clear()
        self._orphaned = ""
        for pushes in self._pushes:
            pushes.clear()


def _sorted(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(numbers))
