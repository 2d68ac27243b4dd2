"""What people see of a server: how much it has to do, who waits there for whom, and its trace.

Workers put the number of a step that is traced into the requests that they make meanwhile. A
request that is not answered by its own handler waits, and ends when the handler of somebody else's
request lets it go: that is for whom it waited.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.ps import messages as m
from paceline.ps.caller import Caller
from paceline.telemetry.trace import tracer
from paceline.telemetry.waiting import Waiting

if TYPE_CHECKING:
    from paceline.ps.server import Server

_PATIENCE_S = 2.0  # a longer wait says on whom
_VERBS = {
    m.Push: "apply push",
    m.Commit: "apply commit",
    m.Pull: "answer pull",
    m.Peek: "answer pull",
}


@dataclass
class _Open:
    """A request that has not been answered."""

    behind: str  # what it asks
    since_s: float = 0.0  # when it was handled; 0.0: it still is


class ServerSpans:
    """Follows the requests of traced steps to one partition. Used by the server's loop."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[_Open, int]] = {}  # by rank, seq; with the step
        self._worker: int | None = None  # whose request is handled

    @contextmanager
    def handling(self, caller: Caller, request: m.AnyRequest, num_bytes: int) -> Iterator[None]:
        """Record what happens inside, if the request is of a step that is traced."""
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
        """Record for how long a request has waited, if it has."""
        one, step = self._open.pop((caller.rank, seq), (None, 0))
        if one is None or not one.since_s:
            return
        args = {"behind": one.behind}
        if self._worker is not None and self._worker != caller.worker:
            args["for"] = f"worker {self._worker}"
        name = f"worker {caller.worker} waits"
        tracer.add_beside("waits", name, one.since_s, time.monotonic(), step, **args)

    def unanswered(self, caller: Caller, seq: int) -> None:
        """Forget a request that has no answer."""
        self._open.pop((caller.rank, seq), None)


@dataclass(slots=True)
class Load:
    """What one partition has cost its primary so far."""

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


def long_waits(server: Server, now_s: float) -> list[Waiting]:
    """Return which workers have waited long for an answer, and for which others."""
    found = []
    ranks = {caller.worker: caller.rank for caller in server.callers.values()}
    for hosted in server.hosted:
        for parked in itertools.chain(hosted.readers, *hosted.pushes.values()):
            waited_s = now_s - parked.since_s
            others = hosted.table.awaited(parked.caller.worker)
            missing = tuple(ranks[other] for other in others if other in ranks)
            if waited_s > _PATIENCE_S and missing:
                what = f"table {hosted.table.spec.name!r}"
                found.append(Waiting(parked.caller.rank, what, missing, waited_s))
    return found


class Complaints:
    """Says now and then which workers have waited long, and for whom."""

    def __init__(self) -> None:
        self._due_s = 0.0  # when a long wait is talked about again

    def check(self, server: Server, now_s: float) -> None:
        """Say who has waited long, and for whom."""
        if now_s < self._due_s:
            return
        for hosted in server.hosted:
            waiting = itertools.chain(hosted.readers, *hosted.pushes.values())
            late = {p.caller.worker for p in waiting if now_s - p.since_s > _PATIENCE_S}
            if late:
                self._due_s = now_s + 5 * _PATIENCE_S
                verb = "waits" if len(late) == 1 else "wait"
                others = hosted.table.describe_wait(sorted(late))
                server.surroundings.say(f"{_names('worker', late)} {verb} for {others}")


def _names(noun: str, numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
