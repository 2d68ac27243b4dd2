"""What a trace shows of a server: the requests that it handles, and who waits there for whom.

Workers put the number of a step that is traced into the requests that they make meanwhile. A
request that is not answered by its own handler waits, and ends when the handler of somebody else's
request lets it go: that is for whom it waited.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.ps import messages as m
from paceline.ps.caller import Caller
from paceline.telemetry.trace import tracer

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
