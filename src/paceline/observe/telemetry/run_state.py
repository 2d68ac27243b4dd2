"""The state of a run: one fold of its events, read by everything that shows or keeps a run.

    events -- RunState.apply -+- observe/display/board.py     display, summary, paceline top
                              +- observe/record/sampling.py   TensorBoard, Prometheus
                              `- observe/report/              the page; it also keeps curves

Plain data: no files, no clock. The time comes with each event, on any clock that grows. Sums cover
the whole run; step_times.py has the last seconds. The launcher knows that a process has ended
before any event reports it: it calls `add_process`, `remove` and `set_state`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.errors import UsageError
from paceline.observe.telemetry.events import (
    DONE_SHARE,
    Event,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MembershipEvent,
    ProgressReport,
    Recorded,
    RunEnded,
    RunStarted,
    ServerLoad,
    TrainingConfigured,
)
from paceline.observe.telemetry.staleness import TableReport, waited_for
from paceline.observe.telemetry.step_times import (
    Bottleneck,
    EtaEstimator,
    RateWindow,
    RecentSteps,
    WaitStats,
)
from paceline.observe.telemetry.traffic import Compression, Traffic
from paceline.runtime.mesh import Mesh

RUNNING, FINISHED, LOST = "running", "finished", "lost"
ROLES = {"worker": "", "server": "s", "data": "d"}  # in the order of rows; prefixes of labels
_MAX_NAMES = 200  # of a process's values: a script may put a number into each name
_MAX_TABLES = 1000
_MAX_PROCESSES = 1024  # of each role, in a record's first line

ProcessKey: TypeAlias = tuple[str, int]  # role and number


@dataclass
class Process:
    """What is known of one process. A replacement has the number and the row of its predecessor."""

    role: str
    number: int
    rank: int
    state: str = RUNNING
    step: int | None = None
    values: dict[str, float] = field(default_factory=dict)  # the newest of each name
    reported_in: dict[str, int] = field(default_factory=dict)  # by name: number of the report
    reports: int = 0
    began: tuple[float, int, int] = (0.0, 0, 0)  # time, step, bytes sent at its first report
    last: tuple[float, int, int] = (0.0, 0, 0)  # the same, now
    timed_step: int = 0  # the last one with times
    traffic: Traffic | None = None
    compression: Compression | None = None
    step_rate: RateWindow = field(default_factory=RateWindow)  # of the displayed step number
    byte_rate: RateWindow = field(default_factory=RateWindow)  # of bytes sent
    recent_steps: RecentSteps = field(default_factory=RecentSteps)
    eta: EtaEstimator = field(default_factory=EtaEstimator)

    @property
    def is_worker(self) -> bool:
        return self.role == "worker"

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def label(self) -> str:
        """The short form in tables: "3", "s0" for a server, "d0" for a data worker."""
        return f"{ROLES[self.role]}{self.number}"

    def apply_report(self, t: float, event: ProgressReport) -> None:
        """Apply a report of this process."""
        has_restarted = self.step is not None and event.step < self.step
        self.reports += 1
        self.step = event.step
        self.traffic = event.traffic or self.traffic
        self.compression = event.compression or self.compression
        ended_s = t - event.age_s
        self.last = (ended_s, event.step, self.traffic.num_bytes if self.traffic else 0)
        if self.reports == 1 or has_restarted:
            self.began = self.last
        for name, value in event.values.items():
            if name in self.values or len(self.values) < _MAX_NAMES:
                self.values[name], self.reported_in[name] = value, self.reports
        self.step_rate.add(ended_s, event.step)
        if event.traffic is not None:
            self.byte_rate.add(t, event.traffic.num_bytes)
        if DONE_SHARE in event.values:
            self.eta.add(t, event.values[DONE_SHARE] / 100)
        if event.steps:
            self.timed_step = event.steps[-1].step
            self.recent_steps.add(event.steps, t)


class RunState:
    """The current state of a run. Not thread-safe.

    `accepts_unknown`: reports of an unknown rank add a worker (the first line of the record may be
    missing); else they are ignored.
    """

    def __init__(self, *, accepts_unknown: bool = False) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.num_events = 0
        self.last_s = 0.0  # of the last event
        self.processes: dict[ProcessKey, Process] = {}
        self.names: dict[str, None] = {}  # of reported values, in the order of first appearance
        self.waits = WaitStats()  # by number, including workers that are gone
        self.steps = self.samples = 0  # of all workers
        self.traffic: dict[int, Traffic] = {}  # by rank, including workers that are gone
        self.compression: dict[int, Compression] = {}  # likewise
        self.tables: dict[tuple[str, int], TableReport] = {}  # by table and server
        self.num_table_reports = 0
        self.loads: dict[int, ServerLoad] = {}  # by number of the server: the newest
        self.num_load_reports: dict[int, int] = {}
        self.mesh: Mesh | None = None  # as the workers report it
        self.has_model = False  # a script has called pl.distribute
        self._by_rank: dict[int, Process] = {}
        # Caches, None when outdated: all processes in order; the number of running workers and the
        # finished workers.
        self._ordered: list[Process] | None = None
        self._participants: tuple[int, list[Process]] | None = None
        self._accepts_unknown = accepts_unknown

    # -- processes ----------------------------------------------------------------------------

    def add_process(self, rank: int, role: str, number: int) -> Process:
        """Add a process, in the row of its predecessor if it has one."""
        process = self.processes.get((role, number))
        if process is None or process.rank != rank:
            if process is not None:
                self._by_rank.pop(process.rank, None)
            process = self.processes[role, number] = Process(role, number, rank)
        process.state = RUNNING
        self._by_rank[rank] = process
        self._clear_caches()
        return process

    def remove(self, rank: int) -> None:
        """Remove a process that was released and has left."""
        process = self._by_rank.pop(rank, None)
        if process is not None:
            del self.processes[process.role, process.number]
            self._clear_caches()

    def set_state(self, rank: int, state: str) -> None:
        """Set the state of a process, in a few words."""
        if rank in self._by_rank:
            self._by_rank[rank].state = state
            self._clear_caches()

    def _clear_caches(self) -> None:
        self._ordered = self._participants = None

    def process(self, rank: int) -> Process | None:
        """Return the current process of a rank."""
        return self._by_rank.get(rank)

    def in_order(self) -> list[Process]:
        """Return all processes: workers, servers, data workers."""
        if self._ordered is None:
            order = list(ROLES)
            self._ordered = sorted(
                self.processes.values(), key=lambda one: (order.index(one.role), one.number)
            )
        return self._ordered

    def workers(self) -> list[Process]:
        """Return the workers by number."""
        return [process for process in self.in_order() if process.is_worker]

    def alive(self) -> set[int]:
        """Return the numbers of the workers that run."""
        return {one.number for one in self.processes.values() if one.is_worker and one.is_running}

    @property
    def has_servers(self) -> bool:
        """Whether there are servers, or have been."""
        return bool(self.tables) or any(role == "server" for role, _ in self.processes)

    def table_reports(self) -> list[TableReport]:
        """Return the newest report of each server about each of its tables."""
        return [report for _, report in sorted(self.tables.items())]

    def waited(self) -> dict[int, dict[int, float]]:
        """Return how long each worker waited for each other worker.

        Servers count it; without servers it follows from the times of the steps.
        """
        if self.tables:
            return waited_for(self.table_reports())
        return {worker: dict(times.waited_for_s) for worker, times in self.waits.workers.items()}

    def bottleneck(self) -> Bottleneck | None:
        """Return the worker (or the network) that costs most time; None if it costs little."""
        return self.waits.bottleneck(waited_for(self.table_reports()) if self.has_servers else None)

    @property
    def has_progress(self) -> bool:
        """Whether any process has reported something."""
        return any(process.reports for process in self.processes.values())

    # -- events -------------------------------------------------------------------------------

    def apply(self, t: float, event: Event | MembershipEvent | Recorded) -> None:
        """Apply one event."""
        self.num_events += 1
        self.last_s = max(self.last_s, t)
        if isinstance(event, ProgressReport):
            self._on_progress(t, event)
        elif isinstance(event, TableReport):
            if (event.table, event.server) in self.tables or len(self.tables) < _MAX_TABLES:
                self.tables[event.table, event.server] = event
                self.num_table_reports += 1
        elif isinstance(event, ServerLoad):
            self.loads[event.server] = event
            self.num_load_reports[event.server] = self.num_load_reports.get(event.server, 0) + 1
        elif isinstance(event, RunEnded):
            self.ended = event
        elif isinstance(event, Recorded):
            self._on_change(event)

    def _on_change(self, event: Recorded) -> None:
        if isinstance(event, RunStarted):
            self.started = event
            roles = (("worker", event.workers), ("server", event.servers))
            rank = 0
            for role, count in (*roles, ("data", event.data_workers)):
                for number in range(min(count, _MAX_PROCESSES)):
                    self.add_process(rank + number, role, number)
                rank += count
        elif isinstance(event, MemberJoined):
            if event.role in ROLES:
                self.add_process(event.rank, event.role, event.number)
        elif isinstance(event, MemberLost):
            self.set_state(event.rank, LOST)
        elif isinstance(event, MemberLeft):
            self.set_state(event.rank, FINISHED)
        elif isinstance(event, TrainingConfigured):
            self.has_model = True
            with contextlib.suppress(UsageError):  # from a worker with another version of Paceline
                self.mesh = Mesh.parse(event.values["mesh"]) if "mesh" in event.values else None

    def _on_progress(self, t: float, event: ProgressReport) -> None:
        process = self._by_rank.get(event.rank)
        if process is None:
            if not self._accepts_unknown or ("worker", event.rank) in self.processes:
                return
            process = self.add_process(event.rank, "worker", event.rank)
        process.apply_report(t, event)
        if len(self.names) < _MAX_NAMES:
            self.names.update(dict.fromkeys(event.values))
        if event.traffic is not None:
            self.traffic[event.rank] = event.traffic
        if event.compression is not None:
            self.compression[event.rank] = event.compression
        if event.steps and process.is_worker:
            self.steps += len(event.steps)
            self.samples += sum(step.samples for step in event.steps)
            self._count_waits(process, event)

    def _count_waits(self, process: Process, event: ProgressReport) -> None:
        """Add the times of steps.

        A finished worker took part in its last steps, which other workers may report later. A lost
        worker does not count.
        """
        if self._participants is None:
            workers = [one for one in self.processes.values() if one.is_worker]
            finished = [one for one in workers if one.state == FINISHED]
            self._participants = (sum(one.is_running for one in workers), finished)
        running, finished = self._participants
        for step in event.steps:
            late = sum(one.timed_step >= step.step for one in finished)
            self.waits.add(process.number, (step,), running + late)
