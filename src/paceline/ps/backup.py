"""The synchronous way with backup workers (Chen et al. 2016): each round has the first that come.

With N workers, b of them BACKUPS, a ROUND averages the gradients of the first N - b workers whose
pushes are complete: its MEMBERS. It is over when N - b workers have committed; then the optimizer
runs once, as behind any barrier. Nobody is a backup by name: it is whoever comes last.

A worker is LATE when a round has ended since it last read: its gradient is of older parameters, so
it is dropped, and its commit is answered at once with the newest ones. A worker that comes when the
members are known, but the round is not over, sees the average and commits with the others; its own
gradient is not in it.

Workers count their own steps, and those who were late are behind. When more than b workers are
AHEAD of one (or have left), perhaps all of them wait for it somewhere else, behind their last step:
then it must not wait for a round to be complete. So whoever is behind in that way waits for nobody;
its gradient counts if it is the last that a round still needs, else it is dropped. Nobody waits
for ever: if all who are not through wait for members, the one with the fewest steps has at most b
ahead of it, so at least N - b have pushed, and the round has its members.

A round is decided in one place, so there must be one server: two of them would choose different
members, and each could wait for workers that the other has let go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.ps.barrier import Barrier
from paceline.ps.ledger import Ledger, Push
from paceline.ps.precision import Scratch
from paceline.ps.shard import Shard
from paceline.ps.spec import TableSpec


class FirstArrivals(Barrier):
    """Averages what the first workers push, and drops the rest."""

    def __init__(
        self, spec: TableSpec, shards: Sequence[Shard], ledger: Ledger, scratch: Scratch
    ) -> None:
        super().__init__(spec, shards, ledger, scratch)
        self._need = max(1, len(spec.workers) - spec.rule.backup)
        self._members: tuple[int, ...] = ()  # of the round under way, once they are known
        self._rounds = 0  # that are over
        self._read_at = dict.fromkeys(spec.workers, 0)  # rounds over when a worker last read
        self._taken = dict.fromkeys(spec.workers, 0)  # own steps, also of those who have left
        self._left: set[int] = set()
        # By shard and worker: the own step of its last push in this round. The same one again means
        # that the script has left the step out.
        self._stamps: list[dict[int, int]] = [{} for _ in shards]
        self._dropped: set[int] = set()  # workers whose step under way does not count
        self._credited: set[int] = set()  # members of a round that ended before their commit

    # -- a step -------------------------------------------------------------------------------

    def push(self, worker: int, number: int, push: Push) -> bool:
        """Take a worker's part of an average; false if it is dropped, so that it need not wait."""
        if self.ignores(worker):
            self._dropped.add(worker)
            return False
        stamps, step = self._stamps[number], self._taken[worker]
        if self._members and stamps.get(worker) == step:
            self._leave_out(worker)
        stamps[worker] = step
        if self._members:
            return True
        if self._means[number] is not None:
            self._begin_anew(worker, number)  # it is the average of an older round
        self._pushes[number][worker] = self._in_own_dtype(worker, number, push)
        if self._has_pushed(worker):
            self._close_if_complete()
            if not self._members and self._is_behind(worker):
                self._drop(worker)
        return worker not in self._dropped

    def commit(self, worker: int, outs: object = None) -> Collection[int]:
        """Note that a worker ended its step; enough of them end the round."""
        if not self.ignores(worker):
            return super().commit(worker, outs)
        if worker not in self._credited:
            self._ledger.accounts.dropped(worker)
        self._credited.discard(worker)
        self._dropped.discard(worker)
        self._ledger.end_step(worker)
        self._taken[worker] += 1
        self._drop_those_behind()
        return ()

    def leave(self, worker: int) -> None:
        """Go on without a worker, whose clock is gone already."""
        self._left.add(worker)
        super().leave(worker)
        self._drop_those_behind()

    def ignores(self, worker: int) -> bool:
        """Say whether the step that a worker is in does not count."""
        return self._read_at[worker] < self._rounds or worker in self._dropped

    def on_read(self, worker: int, _number: int) -> None:
        """Remember how new the values are that a worker computes from."""
        self._read_at[worker] = self._rounds

    def _is_behind(self, worker: int) -> bool:
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

    def _drop_those_behind(self) -> None:
        """Let go whoever waits for the members of a round, and must not any more."""
        if not self._members:
            for worker in self._complete():
                if self._is_behind(worker):
                    self._drop(worker)

    # -- the round ----------------------------------------------------------------------------

    def _complete(self) -> list[int]:
        """Name those whose pushes are all there, in the order of ranks."""
        return [worker for worker in self._clocks.workers if self._has_pushed(worker)]

    def _close_if_complete(self) -> None:
        members = self._complete()
        if len(members) < self._need:
            return
        self._members = tuple(members)
        for number, pushes in enumerate(self._pushes):
            own = {worker: pushes[worker] for worker in members}
            self._pushes[number] = own  # what others have pushed of it is not needed
            self._means[number] = self._average(number, own)

    def _leave_out(self, worker: int) -> None:
        """Begin the round anew: scripts have left the step out."""
        for number, stamps in enumerate(self._stamps):
            self._begin_anew(worker, number)
            stamps.clear()
        self._members = ()

    def _contributors(self, _number: int) -> Sequence[int]:
        return ()  # all shards are averaged together, when the members are known

    def _enders(self) -> Sequence[int]:
        return sorted(self._committed) if len(self._committed) >= self._need else ()

    def _leader(self) -> int:
        return min(self._committed)  # the first worker may have the settings of an older step

    def _count(self, workers: Sequence[int]) -> None:
        super()._count([worker for worker in self._clocks.workers if worker in self._members])
        for worker in workers:
            if worker not in self._members:
                self._ledger.accounts.dropped(worker)

    def _end(
        self, workers: Collection[int], *, notice: str = "", error: str = "", text: str = ""
    ) -> None:
        self._credited |= set(self._members) - set(workers)
        super()._end(workers, notice=notice, error=error, text=text)
        for worker in workers:
            self._taken[worker] += 1
        self._rounds += 1

    def _begin_step(self) -> None:
        super()._begin_step()
        self._members = ()
        for stamps in self._stamps:
            stamps.clear()
