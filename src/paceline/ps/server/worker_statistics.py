"""What a table knows about its workers: clocks, settings, how their steps ended, and statistics.

The STATISTICS are the staleness of each worker's updates, and for which workers it waited. They are
sent as a `TableReport` at the end or on request. Time is passed in. A worker often waits for
several other workers at once; its time is shared equally among them, so that the sum over all names
is the time that it really waited. When they arrive one by one, `began_waiting` is called again with
those that are still missing, and the last one gets the rest.

Threads: none; the owner of the table calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.ps.server.optimizer import Settings
from paceline.ps.server.staleness_bound import Clocks


@dataclass
class _Statistics:
    """One worker's numbers."""

    staleness: Counter[int] = field(default_factory=Counter)
    waited_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    dropped: int = 0
    skipped: int = 0
    overwritten: int = 0


class WorkerStatistics:
    """The statistics of a table's workers; those of workers that left are kept."""

    def __init__(self, workers: Iterable[int] = ()) -> None:
        self._statistics: defaultdict[int, _Statistics] = defaultdict(_Statistics)
        self._waits: dict[
            int, tuple[tuple[int, ...], float]
        ] = {}  # worker -> awaited workers, since when
        for worker in workers:
            self._statistics[worker] = _Statistics()

    def began_waiting(self, worker: int, blockers: Iterable[int], now_s: float) -> None:
        """Note which workers a worker waits for from now on; called again when that changes."""
        self.stopped_waiting(worker, now_s)
        names = tuple(blockers)
        if names:
            self._waits[worker] = (names, now_s)

    def stopped_waiting(self, worker: int, now_s: float) -> None:
        """Note that a worker waits no longer; no effect if it did not wait."""
        names, since_s = self._waits.pop(worker, ((), now_s))
        for name in names:
            self._statistics[worker].waited_s[name] += (now_s - since_s) / len(names)

    def updated(self, worker: int, staleness: int) -> None:
        """Count an update of a worker that was applied."""
        self._statistics[worker].staleness[staleness] += 1

    def dropped(self, worker: int) -> None:
        """Count a push that was too old to be applied."""
        self._statistics[worker].dropped += 1

    def skipped(self, worker: int) -> None:
        """Count a push that was skipped because it was not finite."""
        self._statistics[worker].skipped += 1

    def overwritten(self, worker: int, versions: int) -> None:
        """Count versions of other workers that the values of a worker replaced."""
        self._statistics[worker].overwritten += versions

    def restore(self, report: TableReport) -> None:
        """Continue from the statistics of another copy."""
        for one in report.workers:
            account = self._statistics[one.worker] = _Statistics()
            account.staleness.update(one.staleness)
            account.waited_s.update(one.waited_s)
            account.dropped, account.skipped = one.dropped, one.skipped
            account.overwritten = one.overwritten

    def report(self, table: str, server: int, version: int) -> TableReport:
        """Return everything so far; a wait counts once it ends or changes."""
        reports = tuple(
            WorkerReport(
                worker=worker,
                updates=account.staleness.total(),
                staleness=dict(sorted(account.staleness.items())),
                waited_s=dict(sorted(account.waited_s.items())),
                dropped=account.dropped,
                skipped=account.skipped,
                overwritten=account.overwritten,
            )
            for worker, account in sorted(self._statistics.items())
        )
        return TableReport(table=table, server=server, version=version, workers=reports)


@dataclass(frozen=True)
class PushedGradient:
    """A gradient in memory that stays unchanged until the worker reads."""

    grad: torch.Tensor
    absent: frozenset[int]  # parameters (ShardPiece.param) without a gradient


@dataclass(frozen=True)
class StepOutcome:
    """How a worker's last step ended."""

    version: int
    staleness: int = 0
    notice: str = ""  # a warning for the user
    error: str = ""  # name of a class in paceline.errors
    text: str = ""  # of that error
    stops: bool = False  # a worker that took part in it was asked to stop


@dataclass
class WorkerRecords:
    """Shared by a table and its updates."""

    clocks: Clocks
    statistics: WorkerStatistics
    settings: dict[int, Settings]  # by worker: of the param groups, as last committed
    now: Callable[[], float]
    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    stopping: set[int] = field(default_factory=set)  # workers that were asked to stop, in this step
    _waits: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def end_step(
        self,
        worker: int,
        *,
        staleness: int = 0,
        notice: str = "",
        error: str = "",
        text: str = "",
        stops: bool = False,
    ) -> None:
        """Count a step of a worker as finished, whether or not its update was applied."""
        self.clocks.advance(worker)
        self.outcomes[worker] = StepOutcome(
            self.clocks.version, staleness, notice, error, text, stops
        )

    def note_wait(self, worker: int, blockers: tuple[int, ...]) -> None:
        """Note which workers a worker waits for from now on; none: it does not wait."""
        if blockers != self._waits.get(worker, ()):
            self.statistics.began_waiting(worker, blockers, self.now())
            self._waits[worker] = blockers
