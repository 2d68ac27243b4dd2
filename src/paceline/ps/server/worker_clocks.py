"""What a table knows about its workers: clocks, settings, how their steps ended, and the accounts.

ACCOUNTS say who was how stale, and who waited for whom. They are counted where it happens, and told
as a `TableReport` at the end or whenever somebody asks. Time is passed in. A worker often waits for
several others at once; its time is shared equally among them, so that the sum over all names is the
time that it really waited. As they arrive one by one, `began_waiting` is called again with those
that are left, and the last one gets the rest.

Threads: none; the owner of the table calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.ps.server.clock import Clocks
from paceline.ps.server.optimizer import Settings


@dataclass
class _Account:
    """One worker's numbers."""

    staleness: Counter[int] = field(default_factory=Counter)
    waited_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    dropped: int = 0
    skipped: int = 0
    overwritten: int = 0


class Accounts:
    """The numbers of a table's workers; those who left are kept."""

    def __init__(self, workers: Iterable[int] = ()) -> None:
        self._accounts: defaultdict[int, _Account] = defaultdict(_Account)
        self._waits: dict[int, tuple[tuple[int, ...], float]] = {}  # worker -> for whom, since when
        for worker in workers:
            self._accounts[worker] = _Account()

    def began_waiting(self, worker: int, blockers: Iterable[int], now_s: float) -> None:
        """Note for whom a worker waits from now on; may be called again when that changes."""
        self.stopped_waiting(worker, now_s)
        names = tuple(blockers)
        if names:
            self._waits[worker] = (names, now_s)

    def stopped_waiting(self, worker: int, now_s: float) -> None:
        """Note that a worker waits no longer; nothing happens if it did not."""
        names, since_s = self._waits.pop(worker, ((), now_s))
        for name in names:
            self._accounts[worker].waited_s[name] += (now_s - since_s) / len(names)

    def updated(self, worker: int, staleness: int) -> None:
        """Count an update of a worker that was applied."""
        self._accounts[worker].staleness[staleness] += 1

    def dropped(self, worker: int) -> None:
        """Count a push that was too old to be applied."""
        self._accounts[worker].dropped += 1

    def skipped(self, worker: int) -> None:
        """Count a push that was left out because it was not finite."""
        self._accounts[worker].skipped += 1

    def overwritten(self, worker: int, versions: int) -> None:
        """Count versions of others that the values of a worker replaced."""
        self._accounts[worker].overwritten += versions

    def restore(self, report: TableReport) -> None:
        """Go on with what another copy has counted."""
        for one in report.workers:
            account = self._accounts[one.worker] = _Account()
            account.staleness.update(one.staleness)
            account.waited_s.update(one.waited_s)
            account.dropped, account.skipped = one.dropped, one.skipped
            account.overwritten = one.overwritten

    def report(self, table: str, server: int, version: int) -> TableReport:
        """Tell everything so far; a wait counts once it ends or is told again."""
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
            for worker, account in sorted(self._accounts.items())
        )
        return TableReport(table=table, server=server, version=version, workers=reports)


@dataclass(frozen=True)
class Push:
    """A gradient in memory that stays as it is until the worker reads, and what it lacks."""

    grad: torch.Tensor
    absent: frozenset[int]  # parameters (Piece.param) without a gradient


@dataclass(frozen=True)
class Outcome:
    """How a worker's last step ended."""

    version: int
    staleness: int = 0
    notice: str = ""  # something that the user should hear about
    error: str = ""  # name of a class in paceline.errors
    text: str = ""  # what that error says
    stops: bool = False  # a worker that took part in it was asked to stop


@dataclass
class Ledger:
    """Shared by a table and its way of applying updates."""

    clocks: Clocks
    accounts: Accounts
    settings: dict[int, Settings]  # by worker: of the param groups, as it last said
    now: Callable[[], float]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    stopping: set[int] = field(default_factory=set)  # who was asked to stop, in the step under way
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
        """Count a step of a worker as finished, whatever became of its update."""
        self.clocks.advance(worker)
        self.outcomes[worker] = Outcome(self.clocks.version, staleness, notice, error, text, stops)

    def note_wait(self, worker: int, blockers: tuple[int, ...]) -> None:
        """Note whom a worker waits for from now on; nobody means that it goes on."""
        if blockers != self._waits.get(worker, ()):
            self.accounts.began_waiting(worker, blockers, self.now())
            self._waits[worker] = blockers
