"""The parameter server: a loop and a table of handlers.

    wait for a request -> its handler changes a table -> whoever waited for that change is answered

One thread does everything, so every table sees its requests one after the other, and a reader never
sees half of an update. The mathematics is in table.py, the lines to the workers in line.py.

A worker whose process ended is dropped: what it pushed without committing is gone, the others no
longer wait for it. The loop ends when no worker is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline import _core
from paceline.collectives.memory import allocate
from paceline.collectives.topology import Fabric
from paceline.errors import (
    BadFrame,
    PacelineError,
    PeerError,
    ShapeMismatch,
    UnknownKey,
)
from paceline.ps import messages as m
from paceline.ps.hosted import Hosted, Parked, dtype_of, view
from paceline.ps.ledger import Outcome
from paceline.ps.line import Arrival, Landing, Line
from paceline.ps.state_wire import landing, read_state, write_state
from paceline.ps.table import Table
from paceline.telemetry.events import Event, Note

_TICK_S = 0.25  # how soon a worker's end is noticed
_REPORT_S = 1.0
_PATIENCE_S = 2.0  # a longer wait says on whom


class Server:
    """Holds tables for the workers of a job."""

    def __init__(self, fabric: Fabric, index: int, report: Callable[[Event], None]) -> None:
        self.index = index
        self._fabric = fabric
        self._report = report
        self._lines = {worker: Line(fabric, worker) for worker in fabric.membership.workers}
        self._hosted: list[Hosted] = []
        self._by_name: dict[str, Hosted] = {}
        self._reported_s = 0.0
        self._complain_s = 0.0  # when a long wait is talked about again

    def run(self) -> None:
        """Serve until every worker has left or was lost."""
        while self._lines:
            handles = [w.handle for line in self._lines.values() for w in line.works()]
            _core.wait_any(handles, _TICK_S)  # type: ignore[arg-type]
            for line in list(self._lines.values()):
                self._serve(line)
            self._look_around()
        self._send_reports()

    # -- requests -----------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        try:
            for arrival in line.arrivals(self._find_landing):
                self._handle(line, arrival)
                if line.worker not in self._lines:
                    return
        except (PeerError, BadFrame) as error:
            self._drop(line, str(error))

    def _handle(self, line: Line, arrival: Arrival) -> None:
        request = arrival.request
        try:
            if arrival.refusal is not None:
                raise arrival.refusal
            HANDLERS[type(request)](self, line, request, arrival.tensors)
        except (PeerError, BadFrame):
            raise
        except PacelineError as error:
            self._refuse(line, request, error)

    def _refuse(self, line: Line, request: m.AnyRequest, error: PacelineError) -> None:
        """Answer with an error; a push that nobody waits for is refused with its commit."""
        if isinstance(request, m.Push) and 0 <= request.table < len(self._hosted):
            hosted = self._hosted[request.table]
            if not hosted.table.spec.rule.aggregate:
                hosted.refusals.setdefault(line.worker, error)
                return
        self._answer(line, request.seq, error=type(error).__name__, text=str(error))

    def _answer(
        self, line: Line, seq: int, deliveries: Sequence[torch.Tensor] = (), **fields: Any
    ) -> None:
        """Reply; a worker that is gone by now must not disturb whoever the server works for."""
        try:
            line.reply(m.Reply(seq, delivers=bool(deliveries), **fields), deliveries)
        except PeerError as error:
            self._drop(line, str(error))

    def _find_landing(self, line: Line, request: m.AnyRequest) -> Landing:
        """Say where the tensors of a request are, or are to be received."""
        if isinstance(request, m.LoadState):
            return Landing(landing(request.entries), follow=True)
        if not isinstance(request, m.Assign | m.Push | m.Replace):
            return Landing()
        hosted = self.find(request.table)
        spec = hosted.spec_of(request.shard)
        dtype = dtype_of(request.dtype if isinstance(request, m.Push) else spec.dtype)
        if request.where is not None:
            return Landing([view(self._fabric.engine, request.where, spec.count, dtype)])
        return Landing([hosted.staging("push", line.worker, request.shard, dtype)], follow=True)

    def find(self, number: int) -> Hosted:
        """Return a table by its number."""
        if not 0 <= number < len(self._hosted):
            raise UnknownKey(f"server {self.index} has no table {number}: open it first")
        return self._hosted[number]

    # -- handlers -----------------------------------------------------------------------------

    def on_open(self, line: Line, request: m.Open, _: Sequence[torch.Tensor]) -> None:
        hosted = self._by_name.get(request.spec.name)
        is_new = hosted is None
        if hosted is None:
            hosted = self._host(request)
        elif hosted.table.spec != request.spec:
            raise ShapeMismatch(_difference(hosted.table, request, line.worker))
        hosted.seats[line.worker] = request
        self._answer(line, request.seq, table=hosted.number, is_new=is_new)

    def on_find(self, line: Line, request: m.Find, _: Sequence[torch.Tensor]) -> None:
        hosted = self._by_name.get(request.name)
        if hosted is None:
            known = ", ".join(sorted(self._by_name)[:8]) or "none"
            raise UnknownKey(f"no server has a key {request.name!r}; known keys: {known}")
        self._answer(line, request.seq, table=hosted.number, spec=hosted.table.spec)

    def on_assign(self, line: Line, request: m.Assign, given: Sequence[torch.Tensor]) -> None:
        self.find(request.table).assign(request.shard, given[0], request.params)
        self._answer(line, request.seq)

    def on_push(self, line: Line, request: m.Push, given: Sequence[torch.Tensor]) -> None:
        hosted = self.find(request.table)
        table = hosted.table
        table.push(line.worker, request.shard, request.clock, given[0], request.absent)
        if table.spec.rule.aggregate:
            parked = Parked(line, request.seq, time.monotonic())
            hosted.pushes.setdefault(request.shard, []).append(parked)
            self._release_averages(hosted)

    def on_replace(self, line: Line, request: m.Replace, given: Sequence[torch.Tensor]) -> None:
        hosted = self.find(request.table)
        hosted.table.replace_average(request.shard, given[0], request.absent)
        self._answer(line, request.seq)

    def on_commit(self, line: Line, request: m.Commit, _: Sequence[torch.Tensor]) -> None:
        hosted = self.find(request.table)
        refusal = hosted.refusals.pop(line.worker, None)
        if refusal is not None:
            hosted.table.discard(line.worker)
            raise refusal
        hosted.table.commit(line.worker, request.clock, request.settings)
        if request.reads:
            hosted.readers[line.worker] = Parked(line, request.seq, time.monotonic())
        else:
            self._answer(line, request.seq, **_ending(hosted.table.outcome(line.worker)))
        self._release(hosted)

    def on_pull(self, line: Line, request: m.Pull, _: Sequence[torch.Tensor]) -> None:
        hosted = self.find(request.table)
        if request.in_turn:
            hosted.readers[line.worker] = Parked(line, request.seq, time.monotonic())
            self._release(hosted)
            return
        following = hosted.values_for(line.worker)
        self._answer(line, request.seq, following, version=hosted.table.version)

    def on_follow(self, line: Line, request: m.Follow, _: Sequence[torch.Tensor]) -> None:
        hosted = self.find(request.table)
        parked = Parked(line, request.seq, time.monotonic(), request.after)
        hosted.followers.append(parked)
        self._release(hosted)

    def on_fetch_state(self, line: Line, request: m.FetchState, _: Sequence[torch.Tensor]) -> None:
        hosted = self.find(request.table)
        entries, tensors = read_state(hosted.table, request.shard)
        self._answer(line, request.seq, tensors, entries=entries)

    def on_load_state(
        self, line: Line, request: m.LoadState, given: Sequence[torch.Tensor]
    ) -> None:
        write_state(self.find(request.table).table, request, given)
        self._answer(line, request.seq)

    def on_stats(self, line: Line, request: m.Stats, _: Sequence[torch.Tensor]) -> None:
        reports = tuple(hosted.table.report() for hosted in self._hosted)
        self._answer(line, request.seq, reports=reports)

    def on_leave(self, line: Line, request: m.Leave, _: Sequence[torch.Tensor]) -> None:
        self._answer(line, request.seq)
        self._drop(line, "it left")

    # -- what follows from a change -----------------------------------------------------------

    def _host(self, request: m.Open) -> Hosted:
        engine, homes = self._fabric.engine, request.homes

        def memory(shard: int, use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
            if homes and use in ("params", "average"):
                return view(engine, getattr(homes[shard], use), count, dtype)
            return allocate(engine, (count,), dtype)

        table = Table(request.spec, memory, time.monotonic, server=self.index)
        hosted = Hosted(len(self._hosted), table, engine, has_homes=bool(homes))
        self._hosted.append(hosted)
        self._by_name[request.spec.name] = hosted
        return hosted

    def _release_averages(self, hosted: Hosted) -> None:
        for shard in [shard for shard, waiting in hosted.pushes.items() if waiting]:
            if not hosted.table.is_reduced(shard):
                continue
            absent = hosted.table.absent(shard)
            for parked in hosted.pushes.pop(shard):
                following = hosted.average_for(parked.line.worker, shard)
                self._answer(parked.line, parked.seq, following, absent=absent)

    def _release(self, hosted: Hosted) -> None:
        """Answer the commits of whoever may read now, and whoever follows the version."""
        table = hosted.table
        for worker in list(hosted.readers):  # first come, first served
            if not table.may_read(worker):  # each read may take another's turn
                continue
            parked = hosted.readers.pop(worker)
            outcome = table.outcome(worker)
            following = hosted.values_for(worker)
            self._answer(parked.line, parked.seq, following, **_ending(outcome))
        for parked in [one for one in hosted.followers if table.version > one.after]:
            hosted.followers.remove(parked)
            self._answer(parked.line, parked.seq, version=table.version)

    def _drop(self, line: Line, reason: str) -> None:
        if self._lines.pop(line.worker, None) is None:
            return
        line.close()
        for hosted in self._hosted:
            hosted.forget(line.worker)
            hosted.table.leave(line.worker)
        for hosted in self._hosted:
            self._release_averages(hosted)
            self._release(hosted)
        self._send_reports()
        if reason != "it left":
            self._say(f"worker {line.worker} is gone: {reason}")

    # -- the clock on the wall ----------------------------------------------------------------

    def _look_around(self) -> None:
        for worker, line in list(self._lines.items()):
            presence = self._fabric.presence.get(worker)
            if presence is not None and presence.state in ("lost", "left"):
                self._serve(line)  # what it said before its end
                self._drop(line, presence.detail if presence.state == "lost" else "it left")
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            self._send_reports()
        self._complain(now_s)

    def _complain(self, now_s: float) -> None:
        """Say who has waited long, and for whom."""
        if now_s < self._complain_s:
            return
        for hosted in self._hosted:
            late = [w for w, p in hosted.readers.items() if now_s - p.since_s > _PATIENCE_S]
            if late:
                self._complain_s = now_s + 5 * _PATIENCE_S
                self._say(f"{_names('worker', late)} wait for {hosted.table.describe_wait(late)}")

    def _say(self, text: str) -> None:
        self._report(Note(self._fabric.rank, f"server {self.index}: {text}"))

    def _send_reports(self) -> None:
        for hosted in self._hosted:
            self._report(hosted.table.report())


HANDLERS: Mapping[type, Callable[[Server, Line, Any, Sequence[torch.Tensor]], None]] = {
    m.Open: Server.on_open,
    m.Find: Server.on_find,
    m.Assign: Server.on_assign,
    m.Push: Server.on_push,
    m.Replace: Server.on_replace,
    m.Commit: Server.on_commit,
    m.Pull: Server.on_pull,
    m.Follow: Server.on_follow,
    m.FetchState: Server.on_fetch_state,
    m.LoadState: Server.on_load_state,
    m.Stats: Server.on_stats,
    m.Leave: Server.on_leave,
}


def _ending(outcome: Outcome) -> dict[str, Any]:
    return {
        "error": outcome.error,
        "text": outcome.text,
        "notice": outcome.notice,
        "version": outcome.version,
        "staleness": outcome.staleness,
    }


def _names(noun: str, numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _difference(table: Table, request: m.Open, worker: int) -> str:
    """Say what another worker's idea of the same table is different in."""
    there, here = table.spec, request.spec
    what = next(f for f in there.__struct_fields__ if getattr(there, f) != getattr(here, f))
    return (
        f"key {there.name!r} exists with {what} {str(getattr(there, what))[:200]}, but worker"
        f" {worker} wants it with {str(getattr(here, what))[:200]}; use another name, or the same"
        " shape, dtype, optimizer and pace everywhere"
    )
