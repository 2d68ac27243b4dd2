"""An elastic job on this host: it goes on while processes are lost, replaced, added and removed.

    ended by a signal, or evicted      a loss: reported to the coordinator, which decides
    Wanted by the coordinator          a newcomer is started, from the template when it is warm
    ended with code 0                  finished; nobody replaces it
    ended with another code            the script failed: the job ends, as any job does, unless a
                                       mate of its unit was lost before: then it is retired too
    Over from the coordinator          the job ends, with its reason

The coordinator decides who is in the job; the launcher is its eyes and hands on this host. It tells
what became of processes and whether they are stopped, starts who is wanted, and kills who was
evicted: a stopped process must not wake up in memory that others go on using.

Threads: everything runs in the launcher's loop on the main thread, as in launcher/local.py.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace

from paceline.control.client.operator import Happened, News
from paceline.control.membership.decisions import Remark, Unwanted, Wanted
from paceline.control.transport import messages as m
from paceline.control.transport.messages import LossKind
from paceline.launcher.elastic.event_log import Chronicle, hottest
from paceline.launcher.elastic.supervision import MAX_FAILED_STARTS, SupervisedJob
from paceline.launcher.job_resources import Foreground
from paceline.launcher.outcome import Outcome, RankResult
from paceline.launcher.processes.exit_signs import Silences
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display
from paceline.observe.telemetry.events import Event, Happening, Progress, Resumed
from paceline.runtime.config import process_start
from paceline.runtime.process_names import Seat

_RETIRED = "retired with its unit"  # the state of a process that ends with its unit
_LEAVE_S = 30.0  # for one that is out of the job to end by itself, on a busy machine
_MATE_S = 10.0  # for the loss to be seen of which a worker has died
_VERDICT_S = 3.0  # for the coordinator to say what follows from the last worker's loss


class ElasticJob(SupervisedJob):
    """Runs one elastic job; `run` is called once, on the main thread."""

    def __init__(
        self,
        spec: RunSpec,
        environ: Mapping[str, str],
        display: Display,
        job_id: str = "",
        holding: Foreground | None = None,
    ) -> None:
        super().__init__(spec, environ, display, job_id, holding)
        mesh = spec.mesh_in(environ)
        self._unit_size = mesh.unit_size if mesh is not None else 1
        self._nursery.unit_size = self._unit_size
        self._chronicle = Chronicle(self._plan, self._unit_size)
        self._culprits: set[int] = set()  # ranks that were lost for reasons of their own
        self._evicted: dict[int, tuple[str, LossKind]] = {}  # ranks of ours that we kill, and why
        self._declared: dict[int, tuple[str, LossKind]] = {}  # ranks that are lost by others' doing
        self._given_up: set[int] = set()  # ranks of ours that are lost, and may not have ended yet
        self._dismissed: dict[int, float] = {}  # no longer in the job: when to insist
        self._parting: dict[int, float] = {}  # left before their work was done: the same
        self._silences = Silences()
        self._left: set[int] = set()  # ranks that have said goodbye
        self._losses: list[RankResult] = []

    async def run(self) -> Outcome:
        outcome = await super().run()
        first = outcome.first  # one who died of the end of the job is not its cause
        if self._over and first is not None and first.is_consequence:
            first = None
        return replace(outcome, first=first, over=self._over, lost=tuple(self._losses))

    def was_lost_at_start(self, outcome: Outcome) -> bool:
        return not self._board.has_progress and outcome.was_lost_at_start

    def may_start_again(self, outcome: Outcome) -> bool:
        return outcome.was_lost_with_too_many

    def story(self) -> list[str]:
        return [*self._chronicle.summary(), *hottest(self._lookout.busy_servers())]

    # -- watch -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        assert self._control is not None
        self._looking = asyncio.ensure_future(self._look_around())
        self._spawn(self._attach())
        try:
            while not self._is_decided():
                await self._next_change()
            if self._crew.failures():
                await self._await_cause()
            elif self._over:
                await self._await_lost()
        finally:
            self._is_ending = self._nursery.is_closed = True
            await self._finish_tasks()
        if not self._over and not self._crew.failures() and not self._interrupts:
            await self._await_guests()
            await self._await_servers()

    def _is_decided(self) -> bool:
        """Say whether the job is over: failed, interrupted, or all workers have finished."""
        if self._interrupts or self._over or self._crew.failures():
            return True
        return not self._crew.workers and not self._tasks and not self._guests()

    def _guests(self) -> set[int]:
        """The workers that joined by hand, and are still there: the job is theirs too."""
        membership = self._chronicle.membership
        workers = membership.workers if membership is not None else ()
        ours = {rank for rank in workers if rank in self._started}
        return set(workers) - ours - self._left - self._chronicle.gone

    async def _await_guests(self) -> None:
        """Let those who joined by hand on this host, and have said goodbye, end by themselves."""
        deadline_s = time.monotonic() + self._spec.grace_s
        guests = [self._chronicle.members[rank] for rank in self._left - self._started]
        here = [guest.pid for guest in guests if guest.hostname == socket.gethostname()]
        while any(process_start(pid) for pid in here) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)

    async def _attach(self) -> None:
        """Hear what the coordinator says; one that was restarted may know of members already."""
        assert self._control is not None
        status = await self._control.attach()
        if status.membership is not None:
            self._on_changed(m.Changed(status.membership))
            for wanted in status.wanted:
                self._want(wanted)

    def _on_look(self, now_s: float) -> None:
        self._name_stuck(now_s)
        self._insist(now_s)

    def _insist(self, now_s: float) -> None:
        """Kill those who are out of the job for long and have not ended by themselves."""
        for rank, until_s in (*self._dismissed.items(), *self._parting.items()):
            process = self._crew.find(rank)
            if process is not None and process.is_running and now_s > until_s:
                process.signal_group(signal.SIGKILL)

    def _on_event(self, event: Event) -> None:
        super()._on_event(event)
        if isinstance(event, Progress) and self._was_in(event.rank):
            self._chronicle.progressed(event.step, time.monotonic())
        elif isinstance(event, Resumed):
            self._show(self._chronicle.resumed(event))

    def _on_note(self, seat: Seat, text: str) -> None:
        name = f"{seat.role} {seat.number}: "
        self._tell(name + text.removeprefix(name))

    # -- ends --------------------------------------------------------------------------------

    def _on_end(self, process: RankProcess) -> None:
        super()._on_end(process)
        rank, status = process.seat.rank, process.status
        assert status is not None
        if self._is_ending or self._chronicle.membership is None:
            return  # a job that has not begun fails as any other
        if status.is_success or status.is_preempted or rank in self._dismissed:
            self._crew.excuse(process)
            self._spawn(self._settle_finished(process))
        elif status.signal is not None or rank in self._evicted or not self._was_in(rank):
            self._crew.excuse(process)
            self._spawn(self._settle_loss(process))
        else:
            self._crew.excuse(process)
            self._spawn(self._settle_error(process))

    def _was_in(self, rank: int) -> bool:
        return rank in self._chronicle.members

    async def _settle_finished(self, process: RankProcess) -> None:
        assert self._control is not None
        rank = process.seat.rank
        self._control.report_end(rank, "finished", None)
        if rank in self._dismissed:
            await self._host.drained([process.seat])
            self._retire(process)
            self._board.remove(process.seat)

    async def _settle_error(self, process: RankProcess) -> None:
        """Find out whether one with an error was given up, or lost a mate; else it has failed."""
        deadline_s = time.monotonic() + (_MATE_S if self._unit_size > 1 else _VERDICT_S)
        await self._host.drained([process.seat])
        while not self._is_bereft(process.seat) and time.monotonic() < deadline_s:
            if not self._crew.is_consequence(process):
                break
            await asyncio.sleep(0.02)
        if self._is_bereft(process.seat):
            await self._settle_loss(process)
        else:
            self._crew.blame(process)

    def _is_bereft(self, seat: Seat) -> bool:
        """Return whether a process has ended because of others, as we or the coordinator saw it."""
        return seat.rank in self._declared or self._lost_mate(seat)

    def _lost_mate(self, seat: Seat) -> bool:
        """Say whether one of its unit was lost before it, for a reason of its own."""
        first = seat.rank - seat.number % self._unit_size  # their ranks are in a row
        ranks = set(range(first, first + self._unit_size)) - {seat.rank}
        return seat.is_worker and not self._culprits.isdisjoint(ranks)

    async def _settle_loss(self, process: RankProcess) -> None:
        """Report a loss at once; then let go of the process."""
        assert self._control is not None and process.status is not None
        seat = process.seat
        why = self._lookout.diagnosis(process)
        if self._silences.is_stuck(seat.rank):
            why = f"stuck without a heartbeat, then {why}"
        is_bereft = process.status.signal is None and self._is_bereft(seat)
        kind = LossKind.CRASHED if process.status.signal is None else LossKind.KILLED
        self._control.report_end(seat.rank, why, LossKind.BEREFT if is_bereft else kind)
        if is_bereft:
            told = self._declared.get(seat.rank, (_RETIRED, LossKind.RETIRED))
            self._evicted.setdefault(seat.rank, told)
        why, kind = self._evicted.get(seat.rank, (why, kind))
        if kind.is_own:
            self._culprits.add(seat.rank)
        else:
            self._board.set_state(seat.rank, _RETIRED)
        if self._was_in(seat.rank):
            self._tell_loss(seat.rank, why, kind)
        await self._host.drained([seat])
        result = self._retire(process)
        if kind.is_own:
            self._losses.append(result)
        if not self._was_in(seat.rank):
            if kind.is_own:
                self._on_failed_start(seat, why)
        elif not self._crew.workers:
            await self._await_verdict()

    def _on_failed_start(self, seat: Seat, why: str) -> None:
        assert self._control is not None
        self._tell(f"{seat.role} {seat.number} ended before it had joined: {why}")
        if seat.rank >= 0:
            self._control.report_end(seat.rank, why, LossKind.ENDED)
        if not self._nursery.failed(seat.place):
            return
        text = f"{MAX_FAILED_STARTS} newcomers in a row ended before they had joined as"
        text = f"{text} {seat.role} {seat.number}, the last one: {why}"
        if self._plan.on_loss == "replace" and not seat.is_server:
            self._end_job(text)
        else:
            self._tell(f"{text}; no further one is started")

    async def _await_lost(self) -> None:
        """Let those end whose loss ended the job: it was heard of when their connections closed,
        which is before the process is gone. Else they would seem to have failed by themselves."""
        deadline_s = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline_s:
            self._crew.look()
            if not any(one.seat.rank in self._given_up for one in self._crew.running):
                return
            await asyncio.sleep(0.02)

    async def _await_verdict(self) -> None:
        """The last worker is lost: the coordinator says what that means, if it is there."""
        deadline_s = time.monotonic() + _VERDICT_S
        while not self._is_settled() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        if not self._is_settled():
            self._end_job("no worker is left")

    def _is_settled(self) -> bool:
        return bool(self._over or self._crew.workers or self._is_ending)

    def _retire(self, process: RankProcess) -> RankResult:
        self._lookout.forget(process)
        return self._host.retire(process)

    def _tell_loss(self, rank: int, why: str, kind: LossKind) -> None:
        self._silences.end(rank)
        line = self._chronicle.lost(rank, why, kind, time.monotonic())
        if line is not None:
            self._show(line)

    # -- news --------------------------------------------------------------------------------

    def _on_news(self, news: News) -> None:
        """Take in what the coordinator says."""
        if isinstance(news, m.Changed):
            self._on_changed(news)
        elif isinstance(news, m.Presence):
            self._on_presence(news)
        elif isinstance(news, Happened):
            self._on_happened(news.event)
        elif isinstance(news, m.Over):
            self._end_job(news.why)
        elif isinstance(news, Wanted):
            self._want(news)
        elif isinstance(news, Unwanted) and self._was_in(news.rank):
            self._dismissed[news.rank] = time.monotonic() + _LEAVE_S
            self._tell(f"{self._chronicle.name(news.rank)} is no longer wanted, and leaves")
        elif isinstance(news, Remark):
            self._tell(news.text)
        self._changed.set()

    def _on_happened(self, event: Event | Happening) -> None:
        if isinstance(event, Event):
            self._on_event(event)
            return
        self._display.record(event)
        if (line := self._chronicle.happened(event)) is not None:
            self._show(line)

    def _on_changed(self, news: m.Changed) -> None:
        before = self._chronicle.membership
        self._chronicle.take(news.membership)
        for member in news.membership.members:
            self._seats.setdefault(
                member.rank, Seat(member.rank, member.number, member.role == "server", True)
            )
        if before is None:
            return
        for loss in news.lost:
            if loss.rank in self._left:  # it ends by itself, and says why
                self._parting[loss.rank] = time.monotonic() + _LEAVE_S
            else:
                self._evict(loss.rank, loss.why, loss.kind)
        for rank in news.joined:
            self._nursery.joined(self._seats[rank].place)
            self._board.seat(self._seats[rank])
            self._show(self._chronicle.joined(rank, time.monotonic()))

    def _on_presence(self, news: m.Presence) -> None:
        was_in, kind = self._was_in(news.rank), news.kind or LossKind.ENDED
        is_ours = was_in or self._crew.find(news.rank) is not None  # perhaps a newcomer
        if news.state == "lost" and is_ours:
            self._evict(news.rank, news.detail, kind)
        elif was_in and news.state == "left":
            self._left.add(news.rank)
            if news.kind is LossKind.RELEASED:  # its mates may end it before it does so itself
                self._evicted.setdefault(news.rank, (news.detail, news.kind))
        elif was_in:
            self._on_silence(news)

    def _on_silence(self, news: m.Presence) -> None:
        """Tell of a stopped process at once, of one that runs only when it stays silent."""
        process = self._crew.find(news.rank)
        if news.state == "back":
            if not self._silences.end(news.rank):
                self._show(self._chronicle.presence(news))
        elif process is None or process.is_frozen():
            self._show(self._chronicle.presence(news))
        else:
            self._silences.begin(news.rank, time.monotonic())

    def _name_stuck(self, now_s: float) -> None:
        """Name those that run but have said nothing for long: a busy machine explains no more."""
        for rank, silent_s in self._silences.stuck_since(now_s):
            words = f"has sent no heartbeat for {silent_s:.0f} s, though its process runs"
            self._tell(f"{self._chronicle.name(rank)} {words}: it may be stuck")
            process = self._crew.find(rank)
            if process is not None:
                process.ask_for_stacks()

    def _evict(self, rank: int, why: str, kind: LossKind) -> None:
        """End a process that the job has given up; its line comes with its diagnosis."""
        process = self._crew.find(rank)
        if kind.is_own:
            self._culprits.add(rank)
        if kind.is_consequence:
            self._declared[rank] = (why, kind)
        if process is None:  # of another host, or long gone
            self._tell_loss(rank, why, kind)
        elif process.is_running:
            self._given_up.add(rank)
            if not process.is_exiting:
                self._evicted[rank] = (why, kind)
                process.signal_group(signal.SIGKILL)
