"""What a server reports: its load, which workers wait there for which, and its trace.

Workers put the number of a traced step into the requests that they make meanwhile. A request that
is not answered by its own handler waits until the handler of another worker's request answers it:
that is the worker that it waited for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.observe.telemetry.events import ServerLoad
from paceline.observe.telemetry.trace import tracer
from paceline.observe.telemetry.wait_reports import WaitReport, WaitReporter
from paceline.ps import messages as m
from paceline.ps.server.worker_memory import Caller

if TYPE_CHECKING:
    from paceline.ps.server.server import Server

_PATIENCE_S = 2.0  # longer waits are logged
_WAITS_S = 0.5  # how often changed waits are sent to the launcher
_REPORT_S = 1.0
_VERBS = {
    m.Push: "apply push",
    m.Commit: "apply commit",
    m.Pull: "answer pull",
    m.Peek: "answer pull",
}


@dataclass
class _Open:
    """A request that has not been answered."""

    kind: str
    since_s: float = 0.0  # when it was handled; 0.0: it still is


class ServerSpans:
    """Records the requests of traced steps to one partition. Used by the server's loop."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[_Open, int]] = {}  # by rank, seq; with the step
        self._worker: int | None = None  # that made the request which is handled

    @contextmanager
    def handling(self, caller: Caller, request: m.AnyRequest, num_bytes: int) -> Iterator[None]:
        """Record the handling of a request, if its step is traced."""
        before, self._worker = self._worker, caller.worker
        key, start_s, verb = (caller.rank, request.seq), time.monotonic(), _VERBS.get(type(request))
        is_traced = request.step > 0 and verb is not None
        if is_traced:
            kind = type(request).__name__.lower()
            self._open[key] = (_Open(kind), request.step)
        try:
            yield
        finally:
            self._worker = before
            if is_traced:
                name = f"{verb} worker {caller.worker}"
                tracer.serve(name, start_s, request.step, bytes=num_bytes)
                if key in self._open:
                    self._open[key][0].since_s = time.monotonic()

    def answered(self, caller: Caller, seq: int) -> None:
        """Record how long a request has waited, if it has."""
        one, step = self._open.pop((caller.rank, seq), (None, 0))
        if one is None or not one.since_s:
            return
        args = {"behind": one.kind}
        if self._worker is not None and self._worker != caller.worker:
            args["for"] = f"worker {self._worker}"
        name = f"worker {caller.worker} waits"
        tracer.add_async("waits", name, one.since_s, time.monotonic(), step, **args)

    def unanswered(self, caller: Caller, seq: int) -> None:
        """Forget a request that has no answer."""
        self._open.pop((caller.rank, seq), None)


@dataclass(slots=True)
class Load:
    """The work that one partition has caused on its primary so far."""

    requests: int = 0
    num_bytes: int = 0  # of tensors that came with them
    busy_s: float = 0.0  # spent on them

    def __sub__(self, other: Load) -> Load:
        return Load(
            self.requests - other.requests,
            self.num_bytes - other.num_bytes,
            self.busy_s - other.busy_s,
        )

    def __add__(self, other: Load) -> Load:
        return Load(
            self.requests + other.requests,
            self.num_bytes + other.num_bytes,
            self.busy_s + other.busy_s,
        )


def long_waits(server: Server, now_s: float) -> list[WaitReport]:
    """Return which workers have waited long for an answer, and for which other workers."""
    found = []
    ranks = {caller.worker: caller.rank for caller in server.callers.values()}
    for served in server.tables:
        for parked in itertools.chain(served.readers, *served.pushes.values()):
            waited_s = now_s - parked.since_s
            others = served.table.awaited(parked.caller.worker)
            missing = tuple(ranks[other] for other in others if other in ranks)
            if waited_s > _PATIENCE_S and missing:
                what = f"table {served.table.spec.name!r}"
                found.append(WaitReport(parked.caller.rank, what, missing, waited_s))
    return found


class Reports:
    """The reports of a server process about all of its partitions. Used by its loop."""

    def __init__(self, rank: int, number: int, report: Callable[[Any], None]) -> None:
        self._rank, self._number, self._report = rank, number, report
        self._waits, self._told_waits_s = WaitReporter(report), 0.0
        self._log_waits_s = 0.0  # when a long wait is logged again
        self._reported_s = time.monotonic()
        self._load, self._turn = Load(), Load()  # reported so far; at the end of the last turn
        self._queued = 0  # the most requests of one turn since then

    def turned(self, servers: Sequence[Server]) -> None:
        """Count a turn: requests that arrived during one turn wait for the next one."""
        requests = sum(server.load.requests for server in servers)
        self._queued = max(self._queued, requests - self._turn.requests)
        self._turn = Load(requests)

    def check(self, servers: Sequence[Server], now_s: float) -> bool:
        """Send the reports that are due; true: the report of each second was."""
        for server in servers:
            self._log_waits(server, now_s)
        if now_s - self._told_waits_s >= _WAITS_S:
            self._told_waits_s = now_s
            found = [wait for server in servers for wait in long_waits(server, now_s)]
            self._waits.update(msgspec.structs.replace(one, told_by=self._rank) for one in found)
        if now_s - self._reported_s < _REPORT_S:
            return False
        self._report_load(servers, now_s - self._reported_s)
        self._reported_s = now_s
        return True

    def _log_waits(self, server: Server, now_s: float) -> None:
        """Log which workers have waited long, and for which."""
        if now_s < self._log_waits_s:
            return
        for served in server.tables:
            waiting = itertools.chain(served.readers, *served.pushes.values())
            late = {p.caller.worker for p in waiting if now_s - p.since_s > _PATIENCE_S}
            if late:
                self._log_waits_s = now_s + 5 * _PATIENCE_S
                verb = "waits" if len(late) == 1 else "wait"
                others = served.table.describe_wait(sorted(late))
                server.context.log(f"{_names('worker', late)} {verb} for {others}")

    def _report_load(self, servers: Sequence[Server], seconds: float) -> None:
        total = sum((server.load for server in servers), Load())
        lately, self._load = total - self._load, total
        queued, self._queued = self._queued, 0
        self._report(
            ServerLoad(
                self._rank,
                self._number,
                lately.requests / seconds,
                lately.num_bytes / seconds,
                lately.busy_s / seconds,
                queued,
            )
        )


def _names(noun: str, numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
