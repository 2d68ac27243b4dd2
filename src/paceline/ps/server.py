"""The parameter server: a loop and a table of handlers.

    wait for a request -> its handler changes a table -> whoever waited for that change is answered

One thread decides everything, so every table sees its requests one after the other, and a reader
never sees half of an update (large ones are computed by a few threads, grains.py). The handlers are
in handlers.py, the mathematics in table.py, the lines to the workers in line.py.

A worker whose process ended is dropped: what it pushed without committing is gone, the others no
longer wait for it. The loop ends when no worker is left.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline import _core
from paceline.collectives.memory import allocate
from paceline.collectives.topology import Fabric
from paceline.errors import (
    BadFrame,
    PacelineError,
    PeerError,
    ProtocolError,
    UnknownKey,
    UsageError,
)
from paceline.ps import messages as m
from paceline.ps.handlers import HANDLERS, ending
from paceline.ps.hosted import Hosted, Parked, dtype_of, view
from paceline.ps.line import Arrival, Landing, Line
from paceline.ps.state_wire import landing
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
        self._lines = {worker: Line(fabric, worker, index) for worker in fabric.membership.workers}
        self.hosted: list[Hosted] = []  # by number
        self.by_name: dict[str, Hosted] = {}
        self._reported_s = 0.0
        self._complain_s = 0.0  # when a long wait is talked about again
        self._unreachable: dict[Line, str] = {}  # lines that could not be answered, and why

    def run(self) -> None:
        """Serve until every worker has left or was lost."""
        while self._lines:
            handles = [w.handle for line in self._lines.values() for w in line.works()]
            _core.wait_any(handles, _TICK_S)  # type: ignore[arg-type]
            for line in list(self._lines.values()):
                self._serve(line)
            self._drop_unreachable()
            self._look_around()
        self._send_reports()

    # -- requests -----------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        try:
            for arrival in line.arrivals(self._find_landing):
                self._handle(line, arrival)
                if line.worker not in self._lines:
                    return
        except BadFrame as error:
            self._mute(line, error)
        except PeerError as error:
            self.drop(line, str(error))

    def _mute(self, line: Line, error: BadFrame) -> None:
        """Go on without a worker that says what cannot be read: nobody knows what it wanted."""
        text = f"server {self.index} has stopped listening to worker {line.worker}: {error}"
        self._say(text)
        self._forget(line)
        try:
            line.mute(f"{text}. Do all processes run the same version of Paceline?")
        except PeerError as lost:
            self.drop(line, str(lost))

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
        except Exception as error:  # a request must not take the other workers' server with it
            traceback.print_exc()
            what = f"{type(request).__name__} of worker {line.worker}: {error!r:.200}"
            text = f"server {self.index} cannot handle {what}; its own output says where"
            self._refuse(line, request, ProtocolError(text))

    def _refuse(self, line: Line, request: m.AnyRequest, error: PacelineError) -> None:
        """Answer with an error; a push that nobody waits for is refused with its commit."""
        if isinstance(request, m.Push) and 0 <= request.table < len(self.hosted):
            hosted = self.hosted[request.table]
            if not hosted.table.spec.rule.aggregate:
                hosted.refusals.setdefault(line.worker, error)
                return
        self.answer(line, request.seq, error=type(error).__name__, text=str(error))

    def answer(
        self, line: Line, seq: int, deliveries: Sequence[torch.Tensor] = (), **fields: Any
    ) -> None:
        """Reply; a worker that is gone by now must not disturb whoever the server works for.

        It is dropped later: dropping it answers others, who may be just about to be answered.
        """
        if line in self._unreachable or self._lines.get(line.worker) is not line:
            return
        try:
            line.reply(m.Reply(seq, delivers=bool(deliveries), **fields), deliveries)
        except PeerError as error:
            self._unreachable[line] = str(error)

    def _drop_unreachable(self) -> None:
        while self._unreachable:
            line, reason = next(iter(self._unreachable.items()))
            self.drop(line, reason)
            del self._unreachable[line]

    def _find_landing(self, line: Line, request: m.AnyRequest) -> Landing:
        """Say where the tensors of a request are, or are to be received."""
        if isinstance(request, m.LoadState):
            pieces = self.find(request.table).spec_of(request.shard).pieces
            return Landing(landing(request.entries, pieces), follow=True)
        if not isinstance(request, m.Assign | m.Push | m.Replace):
            return Landing()
        hosted = self.find(request.table)
        spec = hosted.spec_of(request.shard)
        dtype = dtype_of(request.dtype if isinstance(request, m.Push) else spec.dtype)
        if request.where is not None:
            return Landing([hosted.view(line.worker, request.where, spec.count, dtype)])
        if isinstance(request, m.Assign):  # rare, and a push may lie in the other memory
            return Landing([torch.empty(spec.count, dtype=dtype)], follow=True)
        return Landing([hosted.staging("push", line.worker, request.shard, dtype)], follow=True)

    def find(self, number: int) -> Hosted:
        """Return a table by its number."""
        if not 0 <= number < len(self.hosted):
            raise UnknownKey(f"server {self.index} has no table {number}: open it first")
        return self.hosted[number]

    # -- what follows from a change -----------------------------------------------------------

    def host(self, request: m.Open, maker: int) -> Hosted:
        """Make a table."""
        engine, homes = self._fabric.engine, request.homes
        if homes and len(homes) != len(request.spec.shards):
            raise UsageError(f"{len(homes)} homes for {len(request.spec.shards)} shards")
        workers, known = request.spec.workers, self._fabric.membership.workers
        if len(set(workers)) < len(workers) or not set(workers) <= set(known):
            raise UsageError(
                f"table {request.spec.name!r}: its workers {list(workers[:8])} must be ranks of"
                f" this job (0 to {len(known) - 1}), each once"
            )

        def memory(shard: int, use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
            if homes and use in ("params", "average"):
                return view(engine, maker, getattr(homes[shard], use), count, dtype)
            return allocate(engine, (count,), dtype)

        table = Table(request.spec, memory, time.monotonic, server=self.index)
        for worker in request.spec.workers:
            if worker not in self._lines:  # gone already: nobody waits for it
                table.leave(worker)
        hosted = Hosted(len(self.hosted), table, engine, bool(homes), maker)
        self.hosted.append(hosted)
        self.by_name[request.spec.name] = hosted
        return hosted

    def keys(self) -> tuple[str, ...]:
        """Name the tables that are arrays."""
        return tuple(n for n, hosted in self.by_name.items() if hosted.table.spec.shape is not None)

    def release_averages(self, hosted: Hosted) -> None:
        for shard in [shard for shard, waiting in hosted.pushes.items() if waiting]:
            if not hosted.table.is_reduced(shard):
                continue
            absent, speaker = hosted.table.absent(shard), hosted.table.clocks.workers[0]
            for parked in hosted.pushes.pop(shard):
                following = hosted.average_for(parked.line.worker, shard)
                self.answer(
                    parked.line,
                    parked.seq,
                    following,
                    absent=absent,
                    speaker=speaker,
                    notice=hosted.table.verdict(shard),
                )

    def release(self, hosted: Hosted) -> None:
        """Answer the commits of whoever may read now, and whoever follows the version."""
        table = hosted.table
        for parked in list(hosted.readers):  # first come, first served
            worker = parked.line.worker
            if not table.may_read(worker):  # each read may take another's turn
                continue
            hosted.readers.remove(parked)
            self._end_wait(hosted, parked)
        can_change = bool(table.clocks.workers)
        if hosted.followers and (table.is_ready or not can_change):
            self.end_follow(hosted, lambda one: table.version > one.after or not can_change)

    def _end_wait(self, hosted: Hosted, parked: Parked) -> None:
        """Bring values to a reader; if its own places are wrong, that concerns nobody else."""
        line, outcome = parked.line, hosted.table.outcome(parked.line.worker)
        try:
            following = hosted.values_for(line.worker, parked.into) if parked.reads else ()
        except PacelineError as error:
            self.answer(line, parked.seq, error=type(error).__name__, text=str(error))
            return
        # Nobody receives what follows an error.
        self.answer(line, parked.seq, () if outcome.error else following, **ending(outcome))

    def end_follow(self, hosted: Hosted, is_over: Callable[[Parked], bool]) -> None:
        """Tell followers the version."""
        for parked in [one for one in hosted.followers if is_over(one)]:
            hosted.followers.remove(parked)
            self.answer(parked.line, parked.seq, version=hosted.table.version)

    def drop(self, line: Line, reason: str) -> None:
        if self._lines.pop(line.worker, None) is None:
            return
        line.close()
        self._forget(line)
        if reason != "it left":
            self._say(f"worker {line.worker} is gone: {reason}")

    def _forget(self, line: Line) -> None:
        """Go on without a worker: its half of a step is dropped, and nobody waits for it."""
        for hosted in self.hosted:
            hosted.forget(line.worker)
            hosted.table.leave(line.worker)
            if hosted.maker == line.worker and not hosted.table.is_ready:
                self._abandon(hosted)
        for hosted in self.hosted:
            self.release_averages(hosted)
            self.release(hosted)
        self._send_reports()

    def _abandon(self, hosted: Hosted) -> None:
        """Forget a table whose maker is gone before it gave values; others wait for those."""
        name = hosted.table.spec.name
        self.by_name.pop(name, None)
        for parked in hosted.followers:
            text = f"key {name!r} has no value: worker {hosted.maker}, which made it, is gone"
            self.answer(parked.line, parked.seq, error="UnknownKey", text=text)
        hosted.followers.clear()

    # -- the clock on the wall ----------------------------------------------------------------

    def _look_around(self) -> None:
        for worker, line in list(self._lines.items()):
            presence = self._fabric.presence.get(worker)
            if presence is not None and presence.state in ("lost", "left"):
                self._serve(line)  # what it said before its end
                self.drop(line, presence.detail if presence.state == "lost" else "it left")
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            self._send_reports()
        self._complain(now_s)

    def _complain(self, now_s: float) -> None:
        """Say who has waited long, and for whom."""
        if now_s < self._complain_s:
            return
        for hosted in self.hosted:
            waiting = itertools.chain(hosted.readers, *hosted.pushes.values())
            late = {p.line.worker for p in waiting if now_s - p.since_s > _PATIENCE_S}
            if late:
                self._complain_s = now_s + 5 * _PATIENCE_S
                verb = "waits" if len(late) == 1 else "wait"
                others = hosted.table.describe_wait(sorted(late))
                self._say(f"{_names('worker', late)} {verb} for {others}")

    def _say(self, text: str) -> None:
        self._report(Note(self._fabric.rank, f"server {self.index}: {text}"))

    def _send_reports(self) -> None:
        for hosted in self.hosted:
            self._report(hosted.table.report())


def _names(noun: str, numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
