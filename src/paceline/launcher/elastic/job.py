"""An elastic job on this host: it goes on while processes are lost, replaced, added and removed.

    ended by a signal, or evicted      a loss: reported to the coordinator, which decides
    Wanted by the coordinator          a newcomer is started, from the template when it is warm
    ended with code 0                  finished; nobody replaces it
    ended with another code            the script failed: the job ends, as any job does
    Over from the coordinator          the job ends, with its reason

The coordinator decides who is in the job; the launcher is its eyes and hands on this host. It tells
what became of processes and whether they are stopped, starts who is wanted, and kills who was
evicted: a stopped process must not wake up in memory that others go on using.

Threads: everything runs in the launcher's loop on the main thread, as in local.py.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from paceline import coordinate
from paceline.cluster import messages as m
from paceline.cluster.decisions import Remark, Unwanted, Wanted
from paceline.cluster.operator_messages import Happened, News
from paceline.config import EngineConfig
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.display import Display
from paceline.launcher.elastic.chronicle import Chronicle, stamped
from paceline.launcher.elastic.control import Control, policy_of
from paceline.launcher.elastic.coordination import Coordination
from paceline.launcher.elastic.facts import JobFacts, job_name, record, write_facts
from paceline.launcher.elastic.nursery import MAX_FAILED_STARTS, Nursery
from paceline.launcher.elastic.template import adopt_orphans
from paceline.launcher.elastic.watch import Signs
from paceline.launcher.environment import SERVER_PATIENCE_S
from paceline.launcher.lifeline import Guard
from paceline.launcher.lines import printable
from paceline.launcher.local import LocalJob
from paceline.launcher.outcome import Outcome
from paceline.launcher.outlet import Outlet
from paceline.launcher.process import RankProcess
from paceline.launcher.report import RankResult
from paceline.launcher.seat import Seat
from paceline.launcher.spec import RunSpec
from paceline.telemetry.events import Event, Happening, Progress

_LOOK_S = 0.25
_SETTLED_S = 5.0  # after they have met, workers of a script without reports are busy as usual
_LEAVE_S = 10.0  # for one that is out of the job to end by itself
_SETTLE_S = 1.0  # for what was under way when the job was over
_VERDICT_S = 3.0  # for the coordinator to say what follows from the last worker's loss


class ElasticJob(LocalJob):
    """Runs one elastic job; `run` is called once, on the main thread."""

    def __init__(
        self, spec: RunSpec, environ: Mapping[str, str], display: Display, job_id: str = ""
    ) -> None:
        super().__init__(spec, environ, display, job_id)
        assert spec.elastic is not None
        self._plan = spec.elastic
        self._chronicle = Chronicle(self._plan, spec.servers)
        self._nursery = Nursery(spec, self._tell)
        self._control: Control | None = None
        self._signs: dict[int, Signs] = {}
        self._evicted: dict[int, str] = {}  # ranks of ours that we kill, and why
        self._dismissed: dict[int, float] = {}  # no longer in the job: when to insist
        self._left: set[int] = set()  # ranks that have said goodbye
        self._losses: list[RankResult] = []
        self._starting: set[tuple[bool, int]] = set()  # places for which no rank is reserved yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._warm_up_s = float("inf")  # when to start the template
        self._is_ending = False
        self._over = ""

    async def run(self) -> Outcome:
        outcome = await super().run()
        return replace(outcome, over=self._over, lost=tuple(self._losses))

    def story(self) -> list[str]:
        return self._chronicle.summary()

    # -- start -------------------------------------------------------------------------------

    async def _open_control(self, secret: bytes, config: EngineConfig) -> str:
        adopt_orphans()
        coordination = Coordination("127.0.0.1", self._coordinator_port(), self._tell)
        self._control = Control(coordination, secret, self._job_id, self._on_news)
        has_servers = bool(self._spec.num_servers)
        arguments = coordinate.arguments(
            job_id=self._job_id,
            secret_file=str(self._secret_path),
            journal=str(self._directory.path / "journal"),
            policy=policy_of(self._spec, self._plan, config),
            join_timeout_s=SERVER_PATIENCE_S if has_servers else config.join_timeout_s,
        )
        coordination.start(arguments, self._environ)
        return coordination.address

    def _coordinator_port(self) -> int:
        return 0

    async def _close_control(self) -> None:
        self._nursery.close()
        if self._control is not None:
            await self._control.close()

    def _start_all(self) -> None:
        write_facts(self._directory.path, self._facts())
        for seat in self._spec.seats:
            self._start(seat, self._outlet(seat))

    def _facts(self) -> JobFacts:
        return JobFacts(
            name=job_name(self._spec, self._job_id),
            job_id=self._job_id,
            coordinator=self._where.coordinator,
            secret_file=self._where.secret_file,
            master_port=self._where.master_port,
            supervisor=os.getpid(),
            cwd=os.getcwd(),
            command=shlex.join((self._spec.target, *self._spec.arguments)),
            pace=str(self._spec.pace or ""),
            log_dir=str(self._spec.log_dir.absolute()) if self._spec.log_dir else "",
            is_detached=self._spec.is_detached,
            grace_s=self._spec.grace_s,
        )

    def _start(self, seat: Seat, outlet: Outlet) -> RankProcess:
        process = super()._start(seat, outlet)
        self._started(process)
        return process

    def _started(self, process: RankProcess) -> None:
        record(self._directory.path, process.seat, process.pid)
        self._know(process)

    def _know(self, process: RankProcess) -> None:
        self._seats[process.seat.rank] = process.seat
        self._signs[process.seat.rank] = Signs(process)

    async def _start_newcomer(self, is_server: bool, number: int) -> None:
        """Start a process for a place that lacks one."""
        assert self._control is not None
        try:
            await asyncio.sleep(self._nursery.pause_s((is_server, number)))
            place = await self._control.reserve("server" if is_server else "worker", number)
        finally:
            self._starting.discard((is_server, number))
        if self._is_ending:
            return
        seat = Seat(place.rank, number, is_server, is_newcomer=True)
        self._board.seat(seat)
        self._board.set_state(seat.rank, "starting")
        try:
            outlet = self._outlet(seat)
            process = await self._nursery.fork(seat, self._environ_of(seat), outlet)
            if process is None:
                self._start(seat, outlet)
            else:
                self._crew.add(process, self._guard)
                self._started(process)
        except LaunchError as error:
            self._settle_failed_start(seat, str(error))
        if self._is_ending:  # it came too late for the others' SIGTERM
            self._crew.kill()

    def _outlet(self, seat: Seat) -> Outlet:
        del seat  # of a detached job it names a file
        return Outlet.pipes()

    # -- watch -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        assert self._control is not None
        looking = asyncio.ensure_future(self._look_around())
        self._spawn(self._attach())
        try:
            while not self._is_decided():
                await self._next_change()
            if self._crew.failures():
                await self._await_cause()
        finally:
            self._is_ending = True
            looking.cancel()
            await self._finish_tasks()
        if not self._over and not self._crew.failures() and not self._interrupts:
            await self._await_servers()

    async def _finish_tasks(self) -> None:
        """Let the last loss be settled, for the report; newcomers on their way come too late."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_SETTLE_S)
            for task in late:
                task.cancel()

    def _is_decided(self) -> bool:
        """Say whether the job is over: failed, interrupted, or all workers have finished."""
        if self._interrupts or self._over or self._crew.failures():
            return True
        return not self._crew.workers and not self._tasks

    async def _attach(self) -> None:
        """Hear what the coordinator says; one that was restarted may know of members already."""
        assert self._control is not None
        status = await self._control.attach()
        if status.membership is not None:
            self._on_changed(m.Changed(status.membership))
            for wanted in status.wanted:
                self._want(wanted)

    async def _look_around(self) -> None:
        """Look at every process a few times per second, and tell the coordinator."""
        assert self._control is not None
        while True:
            now_s = time.monotonic()
            self._on_child()
            for process in self._crew.running:
                signs = self._signs[process.seat.rank]
                signs.look(now_s)
                self._control.report_seen(process.seat.rank, signs.stopped_for_s(now_s))
            if self._chronicle.step or now_s > self._warm_up_s:
                self._warm_up()
            for rank, insist_s in self._dismissed.items():
                late = self._crew.find(rank)
                if late is not None and late.is_running and now_s > insist_s:
                    late.signal_group(signal.SIGKILL)
            await asyncio.sleep(_LOOK_S)

    def _on_child(self) -> None:
        super()._on_child()
        try:
            if self._control is not None and not self._is_ending:
                self._control.look()
        except LaunchError as error:
            self._end_job(str(error))
        guard = self._guard.pid if isinstance(self._guard, Guard) else None
        coordinator = None if self._control is None else self._control.pid
        known = {*self._crew.pids, self._nursery.template_pid, guard, coordinator}
        self._nursery.reap_orphans(known)

    def _on_event(self, event: Event) -> None:
        super()._on_event(event)
        if isinstance(event, Progress) and self._was_in(event.rank):
            self._chronicle.progressed(event.step, time.monotonic())

    def _on_note(self, seat: Seat, text: str) -> None:
        self._tell(f"{seat.role} {seat.number}: {text}")

    def _tell(self, text: str) -> None:
        self._show(stamped(text))

    def _show(self, line: str) -> None:
        self._display.say(printable(line.encode()))

    def _end_job(self, why: str) -> None:
        self._over = self._over or why
        self._changed.set()

    # -- ends --------------------------------------------------------------------------------

    def _on_end(self, process: RankProcess) -> None:
        super()._on_end(process)
        rank, status = process.seat.rank, process.status
        assert status is not None
        if self._is_ending or self._chronicle.membership is None:
            return  # a job that has not begun fails as any other
        if status.is_success:
            self._spawn(self._settle_finished(process))
        elif status.signal is not None or rank in self._evicted or not self._was_in(rank):
            self._crew.excuse(process)
            self._spawn(self._settle_loss(process))

    def _was_in(self, rank: int) -> bool:
        return rank in self._chronicle.members

    async def _settle_finished(self, process: RankProcess) -> None:
        assert self._control is not None
        rank = process.seat.rank
        self._control.report_end(rank, "finished", by_signal=False)
        if rank in self._dismissed:
            await self._crew.drained([process.seat])
            self._retire(process)
            self._board.remove(process.seat)

    async def _settle_loss(self, process: RankProcess) -> None:
        """Report a loss at once; then let go of the process."""
        assert self._control is not None and process.status is not None
        seat = process.seat
        why = self._signs[seat.rank].diagnosis(process.status)
        self._control.report_end(seat.rank, why, by_signal=True)
        if self._was_in(seat.rank):
            self._tell_loss(seat.rank, self._evicted.get(seat.rank, why))
        await self._crew.drained([seat])
        self._losses.append(self._retire(process))
        if not self._was_in(seat.rank):
            self._settle_failed_start(seat, why)
        elif not self._crew.workers:
            await self._await_verdict()

    def _settle_failed_start(self, seat: Seat, why: str) -> None:
        assert self._control is not None
        self._tell(f"{seat.role} {seat.number} ended before it had joined: {why}")
        self._control.report_end(seat.rank, why, by_signal=True)
        if not self._nursery.failed(seat):
            return
        text = f"{MAX_FAILED_STARTS} newcomers in a row ended before they had joined as"
        text = f"{text} {seat.role} {seat.number}, the last one: {why}"
        if self._plan.on_loss == "replace" and not seat.is_server:
            self._end_job(text)
        else:
            self._tell(f"{text}; no further one is started")

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
        self._signs.pop(process.seat.rank, None)
        return self._crew.retire(process, self._guard)

    def _tell_loss(self, rank: int, why: str) -> None:
        line = self._chronicle.lost(rank, why, time.monotonic())
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
        elif (line := self._chronicle.happened(event)) is not None:
            self._show(line)

    def _want(self, wanted: Wanted) -> None:
        """Start a newcomer, unless one is on its way, or its place was given up."""
        place = (wanted.role == "server", wanted.number)
        if place not in self._starting and not self._nursery.has_given_up(place):
            self._starting.add(place)
            self._spawn(self._start_newcomer(*place))

    def _on_changed(self, news: m.Changed) -> None:
        before = self._chronicle.membership
        self._chronicle.take(news.membership)
        for member in news.membership.members:
            self._seats.setdefault(
                member.rank, Seat(member.rank, member.number, member.role == "server", True)
            )
        if before is None:
            self._warm_up_s = time.monotonic() + _SETTLED_S
            return
        for loss in news.lost:
            self._evict(loss.rank, loss.why)
        for rank in news.joined:
            self._nursery.joined(self._seats[rank])
            self._board.seat(self._seats[rank])
            self._show(self._chronicle.joined(rank, time.monotonic()))

    def _on_presence(self, news: m.Presence) -> None:
        if not self._was_in(news.rank):
            return
        if news.state == "lost":
            where = self._chronicle.members[news.rank].where
            self._evict(news.rank, news.detail.removeprefix(f"{where}: "))
        elif news.state == "left":
            self._left.add(news.rank)
        elif news.state in ("silent", "back"):
            self._show(self._chronicle.presence(news))

    def _evict(self, rank: int, why: str) -> None:
        """End a process that the job has given up; its line comes with its diagnosis."""
        process = self._crew.find(rank)
        if process is None:  # of another host, or long gone
            self._tell_loss(rank, why)
        elif process.is_running and not process.is_exiting:
            self._evicted[rank] = why
            process.signal_group(signal.SIGKILL)

    def _warm_up(self) -> None:
        """Start the template, once: not while the first processes still need all cores."""
        self._warm_up_s = float("inf")
        if self._nursery.template_pid is not None:
            return
        environ = self._environ_of(next(iter(self._seats.values())))
        pid = self._nursery.warm_up(environ)
        if pid is not None:
            self._guard.watch(pid)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled() and isinstance(task.exception(), PacelineError):
            self._tell(str(task.exception()))
