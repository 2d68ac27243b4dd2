"""Synchronous updates with backup workers (Chen et al. 2016): each round uses the first to arrive.

With N workers, b of them BACKUPS, a ROUND averages the gradients of the first N - b workers whose
pushes are complete: its MEMBERS. It is over when N - b workers have committed; then the optimizer
runs once, as after any barrier. No worker is a backup by name: the last ones to arrive are.

A worker is LATE when a round has ended since it last read: its gradient is of older parameters, so
it is dropped, and its commit is answered at once with the newest ones. A worker that arrives when
the members are known, but the round is not over, gets the average and commits with the other
workers; its own gradient is not in it.

Workers count their own steps, so a worker that was late LAGS. When more than b workers are AHEAD of
it (or have left), perhaps all of them wait for it elsewhere, after their last step: then it must
not wait for a round to be complete. So a worker that lags that far waits for no other worker; its
gradient counts if it is the last one that a round still needs, else it is dropped. No worker waits
for ever: if all unfinished workers wait for members, the one with the fewest steps has at most b
workers ahead of it, so at least N - b have pushed, and the round has its members.

A round is decided in one place, so there must be one server: two of them would choose different
members, and each could wait for workers that the other has released.

In a job of fixed size a worker that leaves has finished, and counts as ahead for good. In an
ELASTIC job N is the number of present workers: a worker that is lost or leaves is not counted any
more, and at least one is needed. If members of the round under way are lost, it needs as many
commits less; their gradients stay in the average. A newcomer counts as being as far as the foremost
worker, so that no worker waits for it without need. A slot that is kept for a replacement counts:
it is a backup that does not arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.ps.replication.messages import BackupWorkerState, SynchronousState
from paceline.ps.server.precision import Scratch
from paceline.ps.server.shard import Shard
from paceline.ps.server.synchronous import SynchronousUpdates
from paceline.ps.server.worker_statistics import PushedGradient, WorkerRecords
from paceline.ps.spec import TableSpec


class BackupWorkerUpdates(SynchronousUpdates):
    """Averages what the first workers push, and drops the rest."""

    def __init__(
        self, spec: TableSpec, shards: Sequence[Shard], records: WorkerRecords, scratch: Scratch
    ) -> None:
        super().__init__(spec, shards, records, scratch)
        self._members: tuple[int, ...] = ()  # of the round under way, once they are known
        self._quorum = 0  # commits that it needs then
        self._withdrawn: set[int] = set()  # workers that were lost in it
        self._rounds = 0  # that are over
        self._read_at = dict.fromkeys(spec.workers, 0)  # rounds over when a worker last read
        self._taken = dict.fromkeys(spec.workers, 0)  # own steps, also of workers that left
        self._left: set[int] = set()
        # By shard and worker: the own step of its last push in this round. The same one again means
        # that the script has skipped the step.
        self._stamps: list[dict[int, int]] = [{} for _ in shards]
        self._dropped: set[int] = set()  # workers whose step under way does not count
        self._credited: set[int] = set()  # members of a round that ended before their commit

    # -- a step -------------------------------------------------------------------------------

    def push(self, worker: int, number: int, push: PushedGradient) -> bool:
        """Add a worker's gradient to an average; false: dropped, and the worker need not wait."""
        if self.ignores(worker):
            self._dropped.add(worker)
            return False
        stamps, step = self._stamps[number], self._taken[worker]
        if self._members and stamps.get(worker) == step:
            self._restart_round(worker)
        stamps[worker] = step
        if self._members:
            return True
        if self._means[number] is not None:
            self._begin_anew(worker, number)  # it is the average of an older round
        grad = self._shards[number].widened(worker, push.grad)
        self._pushes[number][worker] = PushedGradient(grad, push.absent)
        if self._has_pushed(worker):
            self._close_if_complete()
            if not self._members and self._lags(worker):
                self._drop(worker)
        return worker not in self._dropped

    def commit(self, worker: int, outs: object = None) -> Collection[int]:
        """Note that a worker ended its step; enough of them end the round."""
        if not self.ignores(worker):
            return super().commit(worker, outs)
        if worker not in self._credited:
            self._records.statistics.dropped(worker)
        self._credited.discard(worker)
        self._dropped.discard(worker)
        self._records.end_step(worker)
        self._taken[worker] += 1
        self._drop_laggards()
        return ()

    def leave(self, worker: int) -> None:
        """Drop a worker, whose clock is removed already."""
        if not self._spec.rule.is_elastic:
            self._left.add(worker)
            super().leave(worker)
        else:
            self._withdraw(worker)
            del self._taken[worker], self._read_at[worker]
            super().leave(worker)
            if not self._members:
                self._close_if_complete()  # fewer are needed now
        self._drop_laggards()

    def join(self, worker: int, left_at: int | None) -> int:
        """Add a worker; return the clock that it begins at: the slowest worker's, or its own."""
        self._clocks.join(worker, left_at)
        self._taken[worker] = max(self._taken.values(), default=0)
        self._read_at[worker] = -1
        return self._clocks.clock(worker)

    def vacate(self, worker: int) -> None:
        """Keep the slot of a lost worker; a replacement will repeat its step."""
        self._withdraw(worker)
        self.discard(worker)
        self._committed.discard(worker)
        self._end_if_complete()

    def _withdraw(self, worker: int) -> None:
        """Expect no commit of a worker in the round under way."""
        if worker in self._members and worker not in self._withdrawn:
            self._quorum = max(1, self._quorum - 1)
        self._withdrawn.add(worker)
        self._dropped.discard(worker)
        self._credited.discard(worker)
        for stamps in self._stamps:
            stamps.pop(worker, None)

    def ignores(self, worker: int) -> bool:
        """Return whether a worker's step does not count."""
        return self._read_at[worker] < self._rounds or worker in self._dropped

    def on_read(self, worker: int, _number: int) -> None:
        """Remember how new the values are that a worker computes from."""
        self._read_at[worker] = self._rounds

    def _lags(self, worker: int) -> bool:
        mine = self._taken[worker]
        ahead = [
            other
            for other, taken in self._taken.items()
            if other != worker and (taken > mine or other in self._left)
        ]
        return len(ahead) > self._spec.rule.backup

    def _drop(self, worker: int) -> None:
        self.discard(worker)  # the memory is the worker's again
        self._dropped.add(worker)

    def _drop_laggards(self) -> None:
        """Release workers that wait for the members of a round, and must not any more."""
        if not self._members:
            for worker in self._complete():
                if self._lags(worker):
                    self._drop(worker)

    # -- the round ----------------------------------------------------------------------------

    def _complete(self) -> list[int]:
        """Return the workers whose pushes are complete, in the order of ranks."""
        return [worker for worker in self._clocks.workers if self._has_pushed(worker)]

    @property
    def _need(self) -> int:
        rule, workers = self._spec.rule, self._spec.workers
        return max(1, len(self._clocks.workers if rule.is_elastic else workers) - rule.backup)

    def _close_if_complete(self) -> None:
        members, need = self._complete(), self._need
        if len(members) < need:
            return
        self._members, self._quorum = tuple(members), need
        for number, pushes in enumerate(self._pushes):
            own = {worker: pushes[worker] for worker in members}
            self._pushes[number] = own  # what other workers have pushed of it is not needed
            self._means[number] = self._average(number, own)

    def _restart_round(self, worker: int) -> None:
        """Restart the round: scripts have skipped the step."""
        for number, stamps in enumerate(self._stamps):
            self._begin_anew(worker, number)
            stamps.clear()
        self._members = ()

    def _contributors(self, _number: int) -> Sequence[int]:
        return ()  # all shards are averaged together, when the members are known

    def _enders(self) -> Sequence[int]:
        needed = self._quorum if self._members else self._need
        return sorted(self._committed) if len(self._committed) >= needed else ()

    def _leader(self) -> int:
        return min(self._committed)  # the first worker may have the settings of an older step

    def _count(self, workers: Sequence[int]) -> None:
        super()._count([worker for worker in self._clocks.workers if worker in self._members])
        for worker in workers:
            if worker not in self._members:
                self._records.statistics.dropped(worker)

    def _end(
        self, workers: Collection[int], *, notice: str = "", error: str = "", text: str = ""
    ) -> None:
        self._credited |= set(self._members) - set(workers) - self._withdrawn
        super()._end(workers, notice=notice, error=error, text=text)
        for worker in workers:
            self._taken[worker] += 1
        self._rounds += 1

    def _begin_step(self) -> None:
        super()._begin_step()
        self._members = ()
        self._withdrawn.clear()
        for stamps in self._stamps:
            stamps.clear()

    # -- for another copy ---------------------------------------------------------------------

    def outline(self) -> BackupWorkerState:  # type: ignore[override]
        """Return everything but numbers and pushes."""
        return BackupWorkerState(
            super().outline(),
            self._members,
            self._quorum,
            tuple(sorted(self._withdrawn)),
            self._rounds,
            dict(self._read_at),
            dict(self._taken),
            tuple(sorted(self._left)),
            tuple(dict(stamps) for stamps in self._stamps),
            tuple(sorted(self._dropped)),
            tuple(sorted(self._credited)),
        )

    def restore(self, form: SynchronousState | BackupWorkerState) -> None:
        """Restore the state of another copy; pushes that are not in an average are pushed again."""
        assert isinstance(form, BackupWorkerState)
        super().restore(form.barrier)
        self._members, self._quorum = form.members, form.quorum
        self._withdrawn, self._rounds = set(form.withdrawn), form.rounds
        self._read_at, self._taken = dict(form.read_at), dict(form.taken)
        self._left = set(form.left)
        self._stamps = [dict(stamps) for stamps in form.stamps]
        self._dropped, self._credited = set(form.dropped), set(form.credited)
