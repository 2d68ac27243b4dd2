"""One server's part of a table: what workers push, commit and read, without sockets.

In a step a worker PUSHES a gradient per shard, COMMITS, and READS fresh values. Nothing is applied
before the commit; a repeated push of a shard replaces the earlier one. Pushed tensors are not
copied: they must not change until the worker's next read. The clock of a push or commit is the
number of the step that it ends, counted from 1. Updates are applied by

    SynchronousUpdates     synchronous.py: the workers' mean, once all of them have committed; with
                           backup workers (backup_workers.py) once enough of them have
    AsynchronousUpdates    asynchronous.py: each worker's own, when it commits

A worker is named by its NUMBER. A lost worker LEAVES, or its slot stays VACANT until a replacement
JOINS with that number. A replacement continues at its predecessor's clock, and may REPEAT the last
step that counted (its predecessor may have reached some servers); that step is only answered.

Threads: none; the server's loop calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias, cast

import torch

from paceline.errors import UsageError
from paceline.observe.telemetry.staleness import TableReport
from paceline.ps.replication.messages import TableState
from paceline.ps.server.asynchronous import AsynchronousUpdates, Outs
from paceline.ps.server.backup_workers import BackupWorkerUpdates
from paceline.ps.server.checks import check_table
from paceline.ps.server.optimizer import Settings, StateEntry
from paceline.ps.server.precision import Scratch
from paceline.ps.server.shard import Memory, Shard
from paceline.ps.server.staleness_bound import Clocks, Unit
from paceline.ps.server.synchronous import SynchronousUpdates
from paceline.ps.server.worker_statistics import (
    PushedGradient,
    StepOutcome,
    WorkerRecords,
    WorkerStatistics,
)
from paceline.ps.spec import TableSpec

Updates: TypeAlias = SynchronousUpdates | AsynchronousUpdates


class Table:
    """Values, optimizer and clocks of one table."""

    def __init__(
        self, spec: TableSpec, memory: Memory, now: Callable[[], float], server: int = 0
    ) -> None:
        check_table(spec)
        self.spec = spec
        self.clocks = Clocks(spec.workers, bound=spec.rule.bound, unit=cast(Unit, spec.rule.unit))
        scratch = Scratch(max((shard.count for shard in spec.shards), default=0))
        self.shards = [Shard(spec, number, memory, scratch) for number in range(len(spec.shards))]
        settings: dict[int, Settings] = dict.fromkeys(spec.workers, spec.optimizer.groups)
        self._records = WorkerRecords(self.clocks, WorkerStatistics(spec.workers), settings, now)
        kind: type[Updates] = SynchronousUpdates if spec.rule.aggregate else AsynchronousUpdates
        if spec.rule.backup:
            kind = BackupWorkerUpdates
        self._updates: Updates = kind(spec, self.shards, self._records, scratch)
        self._server = server
        self._unread: set[int] = set()  # workers that committed and have not read since
        self._being_read: dict[int, set[int]] = {}  # by worker: shards of the read under updates
        self.vacant: set[int] = set()
        self._left_at: dict[int, int] = {}  # the clocks of workers that left
        self._has_moved = False  # the waits may have changed since they were last noted
        self._may_repeat: set[int] = set()  # replacements, before their first step
        self._repeating: set[int] = set()  # replacements that do so

    @property
    def version(self) -> int:
        """The number of updates that were applied."""
        return self.clocks.version

    @property
    def is_ready(self) -> bool:
        """Whether every shard has a value."""
        return all(shard.is_assigned for shard in self.shards)

    # -- a step -------------------------------------------------------------------------------

    def assign(self, shard: int, values: torch.Tensor) -> None:
        """Set a shard's values: the first ones, or ones that a script has changed."""
        self._shard(shard).assign(values)

    def push(
        self, worker: int, shard: int, clock: int, grad: torch.Tensor, absent: Collection[int] = ()
    ) -> bool:
        """Remember a gradient; `absent` are the parameters (ShardPiece.param) that have none.

        The gradient of an absent parameter must be zeros: other workers may have one. Returns
        whether it counts: one of a step that was applied already, or is too late, does not.
        """
        if self._is_repeat(worker, clock):
            return False
        self._require_next("push", worker, clock)
        self._repeating.discard(worker)
        target = self._shard(shard)
        target.require_values()
        counts = self._updates.push(
            worker, shard, PushedGradient(target.checked(grad), frozenset(absent))
        )
        self._has_moved = True
        return counts

    def commit(
        self,
        worker: int,
        clock: int,
        settings: Settings | None = None,
        outs: Outs = None,
        *,
        stops: bool = False,
    ) -> Collection[int]:
        """End a worker's step; settings are those of its param groups if they changed. `stops`: it
        was asked to stop, which all workers learn that end the step with it.

        Return the shards whose fresh values are in `outs` already: if the worker may read at once,
        they are copied there while they are in the cache. It still has to `read` them, to None.
        """
        if self._is_repeat(worker, clock):
            self._unread.add(worker)
            return ()
        self._require_next("commit", worker, clock)
        self._may_repeat.discard(worker)
        self._repeating.discard(worker)
        if settings is not None:
            self._records.settings[worker] = self._checked(settings)
        if stops:
            self._records.stopping.add(worker)
        delivered = self._updates.commit(worker, outs)
        self._unread.add(worker)
        self._has_moved = True
        return delivered

    def discard(self, worker: int) -> None:
        """Forget what a worker has pushed for the step under updates."""
        self._updates.discard(worker)

    def pending(self, worker: int) -> dict[int, torch.Tensor]:
        """Return what a worker of an asynchronous table has pushed and not committed, by shard."""
        return self._updates.pending(worker)

    def renew(self, worker: int, shard: int, grad: torch.Tensor) -> None:
        """Use this gradient instead of the one that a worker pushed to an asynchronous table."""
        self._updates.renew(worker, shard, grad)

    def has_committed(self, worker: int) -> bool:
        """Return whether a worker has committed and not read since."""
        return worker in self._unread

    def outcome(self, worker: int) -> StepOutcome:
        """Return how a worker's last step ended."""
        return self._records.outcomes.get(worker, StepOutcome(self.version))

    # -- workers that join and leave ----------------------------------------------------------

    def leave(self, worker: int) -> None:
        """Drop a worker; what it pushed and did not commit is discarded."""
        if worker not in self.clocks.workers:
            return
        self._forget(worker)
        self._left_at[worker] = self.clocks.clock(worker)
        self.clocks.leave(worker)
        self._updates.leave(worker)
        self._has_moved = True

    def vacate(self, worker: int) -> None:
        """Keep the slot of a lost worker until a replacement takes it.

        What it pushed and did not commit is discarded; an average that is known stays.
        """
        if worker not in self.clocks.workers:
            return
        self._forget(worker)
        self.vacant.add(worker)
        self._updates.vacate(worker)
        self._has_moved = True

    def join(self, worker: int) -> int:
        """Add a worker, or a replacement; return the clock that it begins at."""
        if worker in self.clocks.workers and worker not in self.vacant:
            return self.clocks.clock(worker)
        self._may_repeat.add(worker)
        if worker in self.vacant:
            self.vacant.discard(worker)
            return self.clocks.clock(worker)
        self._records.settings[worker] = self._settings_for_newcomer(worker)
        return self._updates.join(worker, self._left_at.pop(worker, None))

    def _forget(self, worker: int) -> None:
        self._records.note_wait(worker, ())
        self._unread.discard(worker)
        self._being_read.pop(worker, None)
        self._may_repeat.discard(worker)
        self._repeating.discard(worker)
        self.vacant.discard(worker)

    def _settings_for_newcomer(self, worker: int) -> Settings:
        """Return another worker's settings: workers send theirs only when they change."""
        first = self.clocks.workers[0] if self.clocks.workers else worker
        return self._records.settings.get(first, self.spec.optimizer.groups)

    def is_repeating(self, worker: int) -> bool:
        """Return whether a worker repeats a step that counted already."""
        return worker in self._repeating

    def has_dropped(self, worker: int) -> bool:
        """Return whether the step of a worker came too late to count, so that it need not wait."""
        return self._updates.ignores(worker)

    def _is_repeat(self, worker: int, clock: int) -> bool:
        if worker not in self._may_repeat or worker not in self.clocks.workers:
            return False
        if not 0 < clock <= self.clocks.clock(worker):
            return False
        self._repeating.add(worker)
        return True

    # -- averages of synchronous tables -------------------------------------------------------

    def is_reduced(self, shard: int) -> bool:
        """Return whether the average of a shard is known."""
        self._shard(shard)
        return self._barrier().mean(shard) is not None

    def absent(self, shard: int) -> tuple[int, ...]:
        """Return the parameters of a reduced shard for which no worker had a gradient."""
        self._shard(shard)
        mean = self._barrier().mean(shard)
        return tuple(sorted(mean.absent)) if mean is not None else ()

    def problem(self, shard: int) -> str:
        """Return why a reduced shard keeps the step from being applied; empty if it does not."""
        self._shard(shard)
        return self._barrier().problem(shard)

    def last_average(self, shard: int) -> tuple[tuple[int, ...], str]:
        """Return what no worker had a gradient for in the last step that ended, and its problem."""
        self._shard(shard)
        return self._barrier().last_average(shard)

    def replace_average(
        self, shard: int, grad: torch.Tensor, absent: Collection[int] | None = None
    ) -> None:
        """Use another gradient, such as a clipped one; `absent` None: the same lack one."""
        lacking = self.absent(shard) if absent is None else absent
        grad = self._shard(shard).checked(grad)
        self._barrier().replace(shard, PushedGradient(grad, frozenset(lacking)))

    # -- reads --------------------------------------------------------------------------------

    def may_read(self, worker: int) -> bool:
        """Return whether a worker may have fresh values now."""
        return self._updates.may_read(worker)

    def read(self, worker: int, shard: int, out: torch.Tensor | None) -> None:
        """Copy a shard's values to a worker; None: it sees the server's own memory.

        A read of the table begins with its first shard, and again with one that was read already.
        A worker that reads although the rule would make it wait gets the values, but for the clocks
        it still has the older ones.
        """
        source = self._shard(shard)
        source.require_values()
        if out is not None:
            source.copy_to(out)
        if shard in self._being_read.setdefault(worker, set()) or not self._being_read[worker]:
            self._begin_read(worker)
        self._being_read[worker].add(shard)
        self._updates.on_read(worker, shard)

    def describe_wait(self, workers: Sequence[int]) -> str:
        """Return the workers that these workers wait for, as a text."""
        others = sorted({other for worker in workers for other in self.awaited(worker)})
        names = ", ".join(str(other) for other in others) or "none"
        return f"worker{'s' if len(others) > 1 else ''} {names} (table {self.spec.name!r})"

    def awaited(self, worker: int) -> tuple[int, ...]:
        """Return the workers that this one has to wait for."""
        if worker in self._unread:
            return self._updates.blockers(worker)
        return self._updates.push_blockers(worker)

    def note_waits(self) -> None:
        """Note which worker waits for which, when all that has arrived is handled."""
        if self._has_moved:
            self._has_moved = False
            for worker in self.clocks.workers:
                self._records.note_wait(worker, self.awaited(worker))

    def _begin_read(self, worker: int) -> None:
        self._being_read[worker].clear()
        if self._updates.may_read(worker):
            self.clocks.read(worker)
            self._unread.discard(worker)
            self._has_moved = True

    # -- the optimizer's state, and snapshots -------------------------------------------------

    def state(self, shard: int) -> list[StateEntry]:
        """Return the optimizer's state of a shard, by piece."""
        return self._shard(shard).state()

    def load_state(self, shard: int, entries: Sequence[StateEntry]) -> None:
        """Replace the optimizer's state of a shard."""
        self._shard(shard).load_state(entries)

    def outline(self) -> TableState:
        """Return everything but numbers, pushes and optimizer state, for another copy."""
        records = self._records
        return TableState(
            self.spec,
            tuple(shard.is_assigned for shard in self.shards),
            self.version,
            self.clocks.outline(),
            {w: tuple(dict(group) for group in groups) for w, groups in records.settings.items()},
            dict(records.outcomes),
            tuple(sorted(self._unread)),
            {worker: tuple(sorted(shards)) for worker, shards in self._being_read.items()},
            tuple(sorted(self.vacant)),
            dict(self._left_at),
            tuple(sorted(self._may_repeat)),
            tuple(sorted(self._repeating)),
            self._updates.outline(),
            self.report(),
        )

    def restore(self, form: TableState) -> None:
        """Restore the state of another copy in a new table of zeros; numbers, optimizer state and
        pushes follow."""
        for shard, is_assigned in zip(self.shards, form.is_assigned, strict=True):
            shard.is_assigned = is_assigned
        self.clocks.restore(form.version, form.clocks)
        self._records.settings.update(form.settings)
        self._records.outcomes.update(form.outcomes)
        self._records.statistics.restore(form.report)
        self._unread, self.vacant = set(form.unread), set(form.vacant)
        self._being_read = {worker: set(shards) for worker, shards in form.being_read.items()}
        self._left_at = dict(form.left_at)
        self._may_repeat, self._repeating = set(form.may_repeat), set(form.repeating)
        self._updates.restore(form.updates)  # type: ignore[arg-type]

    def pushed(self) -> Iterator[tuple[int, int, PushedGradient]]:
        """Yield the pushed gradients that are still needed: worker, shard, gradient."""
        return self._updates.pushed()

    def push_again(self, worker: int, shard: int, push: PushedGradient) -> None:
        """Restore a push of another copy."""
        self._updates.push(worker, shard, push)

    def replaced(self) -> Iterator[tuple[int, PushedGradient]]:
        """Yield the gradients that replaced averages, by shard."""
        updates = self._updates
        return updates.replaced() if isinstance(updates, SynchronousUpdates) else iter(())

    def numbers(self, shard: int, start: int, stop: int) -> list[torch.Tensor]:
        """Return views of all tensors about a range of elements."""
        return self.shards[shard].numbers(start, stop) + self._updates.numbers(shard, start, stop)

    def report(self) -> TableReport:
        """Return what was counted so far."""
        return self._records.statistics.report(self.spec.name, self._server, self.version)

    # -- invalid requests ---------------------------------------------------------------------

    def _shard(self, number: int) -> Shard:
        if not 0 <= number < len(self.shards):
            raise UsageError(
                f"table {self.spec.name!r} has {len(self.shards)} shards on this server, numbered"
                f" from 0; there is no shard {number}"
            )
        return self.shards[number]

    def _require_next(self, operation: str, worker: int, clock: int) -> None:
        live = self.clocks.live.get(worker)
        ended = live.clock if live is not None else self.clocks.clock(worker)  # which raises
        expected = ended + 1 + self._updates.has_ended(worker)
        if clock != expected:
            raise UsageError(
                f"table {self.spec.name!r}: worker {worker} wants to {operation} at clock {clock},"
                f" but its next is {expected}; steps come one after the other"
            )

    def _checked(self, settings: Settings) -> Settings:
        if len(settings) != len(self.spec.optimizer.groups):
            raise UsageError(
                f"table {self.spec.name!r} has {len(self.spec.optimizer.groups)} param groups, but"
                f" the commit has settings of {len(settings)}; add all groups before the first step"
            )
        return settings

    def _barrier(self) -> SynchronousUpdates:
        if not isinstance(self._updates, SynchronousUpdates):
            raise UsageError(f"table {self.spec.name!r} is asynchronous: it averages nothing")
        return self._updates
