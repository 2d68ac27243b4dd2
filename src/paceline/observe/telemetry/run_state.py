"""The state of a run: one fold of its events, which all read that show or keep a run.

    events -- RunState.apply -+- observe/display/board.py                 display, summary, paceline
                                                                          top
                              +- observe/record/sampling.py    TensorBoard, Prometheus
                              `- run_report/                       the page; it keeps curves as well

Plain data: no files, no clock. The time comes with each event, on any clock that grows; sums are of
the whole run, and `recent.py` has the last seconds. The launcher also knows what became of a
process before any event tells of it: `add`, `remove` and `set_state` are for that.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from paceline.errors import UsageError
from paceline.observe.telemetry.event_file import Recorded, RunEnded, RunStarted
from paceline.observe.telemetry.events import (
    DONE_SHARE,
    Event,
    Happening,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Progress,
    ServerLoad,
    Settled,
)
from paceline.observe.telemetry.recent import Course, Recent, Trail
from paceline.observe.telemetry.staleness import TableReport, waited_for
from paceline.observe.telemetry.step_times import Slowest, Waits
from paceline.observe.telemetry.traffic import Compression, Traffic
from paceline.runtime.mesh import Mesh

RUNNING, FINISHED, LOST = "running", "finished", "lost"
ROLES = {"worker": "", "server": "s", "data": "d"}  # in the order of rows; what labels begin with
_MOST_NAMES = 200  # of a process' values: a script may put a number into each name
_MOST_TABLES = 1000
_MOST_SEATS = 1024  # that a record's first line may ask for

Who: TypeAlias = tuple[str, int]  # role and number


@dataclass
class Process:
    """What is known of one process. The one that replaces another has its number, and its place."""

    role: str
    number: int
    rank: int
    state: str = RUNNING
    step: int | None = None
    values: dict[str, float] = field(default_factory=dict)  # the newest of each name
    heard: dict[str, int] = field(default_factory=dict)  # by name: in which report it came
    reports: int = 0
    began: tuple[float, int, int] = (0.0, 0, 0)  # time, step, bytes sent at its first report
    last: tuple[float, int, int] = (0.0, 0, 0)  # the same, now
    timed_step: int = 0  # the last one whose time was told
    traffic: Traffic | None = None
    compression: Compression | None = None
    trail: Trail = field(default_factory=Trail)  # of the step that is shown
    sent: Trail = field(default_factory=Trail)  # bytes
    recent: Recent = field(default_factory=Recent)
    course: Course = field(default_factory=Course)

    @property
    def is_worker(self) -> bool:
        return self.role == "worker"

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def label(self) -> str:
        """The short form, in tables: "3", "s0" for a server, "d0"."""
        return f"{ROLES[self.role]}{self.number}"

    def took_report(self, t: float, event: Progress) -> None:
        """Take in what it tells about itself."""
        has_begun_anew = self.step is not None and event.step < self.step
        self.reports += 1
        self.step = event.step
        self.traffic = event.traffic or self.traffic
        self.compression = event.compression or self.compression
        ended_s = t - event.age_s
        self.last = (ended_s, event.step, self.traffic.num_bytes if self.traffic else 0)
        if self.reports == 1 or has_begun_anew:
            self.began = self.last
        for name, value in event.values.items():
            if name in self.values or len(self.values) < _MOST_NAMES:
                self.values[name], self.heard[name] = value, self.reports
        self.trail.add(ended_s, event.step)
        if event.traffic is not None:
            self.sent.add(t, event.traffic.num_bytes)
        if DONE_SHARE in event.values:
            self.course.add(t, event.values[DONE_SHARE] / 100)
        if event.steps:
            self.timed_step = event.steps[-1].step
            self.recent.add(event.steps, t)


class History(Protocol):
    """Keeps more of a run than its state: curves, and what happened when."""

    def on_progress(self, t: float, process: Process, event: Progress, state: RunState) -> None: ...
    def on_load(self, t: float, event: ServerLoad) -> None: ...
    def on_other(self, t: float, event: Recorded) -> None: ...


class RunState:
    """A run as it stands. Not thread-safe.

    `takes_strangers`: a process that nobody has named counts as a worker (of a record whose first
    line is lost); else what it says is ignored.
    """

    def __init__(self, *, takes_strangers: bool = False, history: History | None = None) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.num_events = 0
        self.last_s = 0.0  # of the last event
        self.processes: dict[Who, Process] = {}
        self.names: dict[
            str, None
        ] = {}  # of reported values, in the order in which they first came
        self.waits = Waits()  # by number, also of those who are gone
        self.steps = self.samples = 0  # of all workers
        self.traffic: dict[int, Traffic] = {}  # by rank, also of those who are gone
        self.compression: dict[int, Compression] = {}  # the same
        self.tables: dict[tuple[str, int], TableReport] = {}  # by table and server
        self.num_tables_told = 0
        self.loads: dict[int, ServerLoad] = {}  # by number of the server: the newest
        self.num_loads_told: dict[int, int] = {}
        self.mesh: Mesh | None = None  # as the workers have settled it
        self._by_rank: dict[int, Process] = {}
        # To be looked at again when they are None: all in order; workers that run (how many), and
        # those that have finished.
        self._ordered: list[Process] | None = None
        self._taking_part: tuple[int, list[Process]] | None = None
        self._takes_strangers = takes_strangers
        self._history = history

    # -- who is there -------------------------------------------------------------------------

    def add(self, rank: int, role: str, number: int) -> Process:
        """Give a process its place: that of its predecessor, if it has one."""
        process = self.processes.get((role, number))
        if process is None or process.rank != rank:
            if process is not None:
                self._by_rank.pop(process.rank, None)
            process = self.processes[role, number] = Process(role, number, rank)
        process.state = RUNNING
        self._by_rank[rank] = process
        self._forget_who_is_there()
        return process

    def remove(self, rank: int) -> None:
        """Forget a process that was no longer wanted and has left."""
        process = self._by_rank.pop(rank, None)
        if process is not None:
            del self.processes[process.role, process.number]
            self._forget_who_is_there()

    def set_state(self, rank: int, state: str) -> None:
        """Note in a few words what became of a process."""
        if rank in self._by_rank:
            self._by_rank[rank].state = state
            self._forget_who_is_there()

    def _forget_who_is_there(self) -> None:
        self._ordered = self._taking_part = None

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
        """Return the last word of every server about each of its tables."""
        return [report for _, report in sorted(self.tables.items())]

    def waited(self) -> dict[int, dict[int, float]]:
        """Return for whom each worker waited: as servers counted it, else as its steps tell it."""
        if self.tables:
            return waited_for(self.table_reports())
        return {worker: dict(times.waited_for_s) for worker, times in self.waits.workers.items()}

    def slowest(self) -> Slowest | None:
        """Name who or what held the workers up; None when nothing is worth a word."""
        return self.waits.slowest(waited_for(self.table_reports()) if self.has_servers else None)

    @property
    def has_progress(self) -> bool:
        """Whether any process has reported something."""
        return any(process.reports for process in self.processes.values())

    # -- events -------------------------------------------------------------------------------

    def apply(self, t: float, event: Event | Happening | Recorded) -> None:
        """Take in one event."""
        self.num_events += 1
        self.last_s = max(self.last_s, t)
        if isinstance(event, Progress):
            self._on_progress(t, event)
        elif isinstance(event, TableReport):
            if (event.table, event.server) in self.tables or len(self.tables) < _MOST_TABLES:
                self.tables[event.table, event.server] = event
                self.num_tables_told += 1
        elif isinstance(event, ServerLoad):
            self.loads[event.server] = event
            self.num_loads_told[event.server] = self.num_loads_told.get(event.server, 0) + 1
            if self._history is not None:
                self._history.on_load(t, event)
        elif isinstance(event, RunEnded):
            self.ended = event
        elif isinstance(event, Recorded):
            self._on_change(event)
            if self._history is not None:
                self._history.on_other(t, event)

    def _on_change(self, event: Recorded) -> None:
        if isinstance(event, RunStarted):
            self.started = event
            roles = (("worker", event.workers), ("server", event.servers))
            rank = 0
            for role, count in (*roles, ("data", event.data_workers)):
                for number in range(min(count, _MOST_SEATS)):
                    self.add(rank + number, role, number)
                rank += count
        elif isinstance(event, MemberJoined):
            if event.role in ROLES:
                self.add(event.rank, event.role, event.number)
        elif isinstance(event, MemberLost):
            self.set_state(event.rank, LOST)
        elif isinstance(event, MemberLeft):
            self.set_state(event.rank, FINISHED)
        elif isinstance(event, Settled) and "mesh" in event.values:
            with contextlib.suppress(UsageError):  # of a worker with another version than ours
                self.mesh = Mesh.parse(event.values["mesh"])

    def _on_progress(self, t: float, event: Progress) -> None:
        process = self._by_rank.get(event.rank)
        if process is None:
            if not self._takes_strangers or ("worker", event.rank) in self.processes:
                return
            process = self.add(event.rank, "worker", event.rank)
        process.took_report(t, event)
        if len(self.names) < _MOST_NAMES:
            self.names.update(dict.fromkeys(event.values))
        if event.traffic is not None:
            self.traffic[event.rank] = event.traffic
        if event.compression is not None:
            self.compression[event.rank] = event.compression
        if event.steps and process.is_worker:
            self.steps += len(event.steps)
            self.samples += sum(step.samples for step in event.steps)
            self._count_waits(process, event)
        if self._history is not None:
            self._history.on_progress(t, process, event, self)

    def _count_waits(self, process: Process, event: Progress) -> None:
        """Add the times of steps. Who has finished took part in its last steps, which others may
        tell of later; who is lost does not count."""
        if self._taking_part is None:
            workers = [one for one in self.processes.values() if one.is_worker]
            finished = [one for one in workers if one.state == FINISHED]
            self._taking_part = (sum(one.is_running for one in workers), finished)
        running, finished = self._taking_part
        for step in event.steps:
            late = sum(one.timed_step >= step.step for one in finished)
            self.waits.add(process.number, (step,), running + late)
