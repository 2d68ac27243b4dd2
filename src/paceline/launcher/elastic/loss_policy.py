"""What the exit of a process means for an elastic job, and what the launcher does about it.

    killed by a signal, or evicted     a loss: reported to the coordinator, which decides
    exited with code 0                 finished; not replaced
    exited with another code           the script failed: the job ends, unless a peer of its unit
                                       was lost before; then it is retired with the unit
    exit status unknown                of an adopted process: finished if it left the job, failed if
                                       its log ends with a traceback, else a loss

The coordinator decides which processes are in the job. The launcher kills a process that was
evicted: a stopped process must not resume in memory that other processes still use.

Threads: everything runs in the launcher's loop on the main thread.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from paceline.control.messages import LossKind
from paceline.launcher.elastic.replacements import MAX_FAILED_STARTS, Slot
from paceline.launcher.processes.process import UNKNOWN, ExitStatus, RankProcess
from paceline.launcher.processes.table import ProcessResult
from paceline.runtime.process_names import ProcessName

if TYPE_CHECKING:
    from paceline.launcher.elastic.job import ElasticJob

_RETIRED = "retired with its unit"  # the state of a process that ends with its unit
LEAVE_S = 30.0  # for one that is out of the job to exit by itself, on a busy machine
_EXIT_S = 1.0  # for an interpreter to end
_PEER_S = 10.0  # for the loss to be seen of which a worker has died
_DECISION_S = 3.0  # for the coordinator to report what follows from the last worker's loss
_FAREWELL_S = 0.5  # for the coordinator to report that an adopted process had left


class LossPolicy:
    """Handles the exits of one elastic job. All sets and mappings are by rank."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        self._own_losses: set[int] = set()  # lost for reasons of their own
        self._evicted: dict[int, tuple[str, LossKind]] = {}  # killed by the launcher, and why
        self._declared: dict[int, tuple[str, LossKind]] = {}  # lost because of another process
        self._given_up: set[int] = set()  # lost, but may not have exited yet
        self._dismissed: dict[int, float] = {}  # removed from the job: when to kill them
        self._leaving: dict[int, float] = {}  # left before their work was done: the same
        self.left: set[int] = set()  # have said goodbye to the coordinator
        self.losses: list[ProcessResult] = []

    # -- news from the coordinator -------------------------------------------------------------

    def on_dismissed(self, rank: int) -> None:
        """A process is no longer wanted, and leaves."""
        self._dismissed[rank] = time.monotonic() + LEAVE_S

    def on_left(self, rank: int, why: str, kind: LossKind | None) -> None:
        """A process has left the job, and exits."""
        self.left.add(rank)
        if kind is LossKind.RELEASED:  # its unit peers may end it before it exits
            self._evicted.setdefault(rank, (why, kind))

    def on_lost(self, rank: int, why: str, kind: LossKind) -> None:
        """The coordinator counts a process as lost; one that has left exits by itself."""
        if rank in self.left:
            self._leaving[rank] = time.monotonic() + LEAVE_S
        else:
            self.evict(rank, why, kind)

    def evict(self, rank: int, why: str, kind: LossKind) -> None:
        """Kill a process that is out of the job; the log line follows with its diagnosis."""
        process = self._job.processes.find(rank)
        if kind.is_own:
            self._own_losses.add(rank)
        if kind.is_consequence:
            self._declared[rank] = (why, kind)
        if process is None:  # of another host, or already removed
            self._job.log_loss(rank, why, kind)
        elif process.is_running:
            if kind is LossKind.UNREACHABLE and rank not in self._given_up:
                self._on_unreachable(process.name, why)
            self._given_up.add(rank)
            if not process.is_exiting:
                self._evicted[rank] = (why, kind)
                process.signal_group(signal.SIGKILL)

    def kill_overdue(self, now_s: float) -> None:
        """Kill processes that are out of the job for long and have not exited by themselves."""
        for rank, until_s in (*self._dismissed.items(), *self._leaving.items()):
            process = self._job.processes.find(rank)
            if process is not None and process.is_running and now_s > until_s:
                process.signal_group(signal.SIGKILL)

    # -- exits ---------------------------------------------------------------------------------

    def on_end(self, process: RankProcess) -> None:
        """Find out what an exit means. A job that is not complete yet fails as any other."""
        job, rank, status = self._job, process.name.rank, process.status
        assert status is not None
        if job.is_ending:
            return
        if status == UNKNOWN:
            job.processes.excuse(process)
            job.start_task(self._settle_unknown(process))
            return
        if job.event_log.membership is None:
            return
        job.processes.excuse(process)
        if status.is_success or status.is_preempted or rank in self._dismissed:
            job.start_task(self._settle_finished(process))
        elif status.signal is not None or rank in self._evicted or self._never_joined(process):
            job.start_task(self._settle_loss(process))
        else:
            job.start_task(self._settle_error(process))

    def _never_joined(self, process: RankProcess) -> bool:
        """Return whether a newcomer ended before it joined. The first processes have all joined if
        there is a membership, also those that the launcher's first news no longer name."""
        return process.name.is_newcomer and not self._job.was_member(process.name.rank)

    async def await_exit(self, slot: Slot) -> None:
        """Wait until it is known why the process in a slot ends. A script with an error leaves the
        job before its interpreter ends, and the job needs no replacement for it."""
        deadline_s = time.monotonic() + _EXIT_S
        while time.monotonic() < deadline_s and self._may_have_failed(slot):
            await asyncio.sleep(0.005)

    def _may_have_failed(self, slot: Slot) -> bool:
        """Return whether a process in a slot has ended, or is about to, and why is not known."""
        return any(
            one.is_exiting or not self._is_known_to_leave(one)
            if one.status is None
            else not one.status.is_success
            for one in self._job.processes.all
            if one.name.slot == slot and not self._job.processes.failures()
        )

    def _is_known_to_leave(self, process: RankProcess) -> bool:
        """Return whether a process leaves that has not failed, but is taken for lost, or goes."""
        rank = process.name.rank
        is_out = rank in self._given_up or rank in self._dismissed
        return is_out or self._job.departures.is_leaving(rank) or self._is_consequence(process.name)

    async def _settle_unknown(self, process: RankProcess) -> None:
        """Find out how a process ended that was not a child of this one."""
        job, rank = self._job, process.name.rank
        deadline_s = time.monotonic() + _FAREWELL_S
        while rank not in self.left and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        await job.hosts.drain_output([process.name])
        if job.processes.has_traceback(process):
            process.status = ExitStatus(1)
        elif rank in self.left or rank in self._dismissed:
            process.status = ExitStatus(0)
        if process.status != UNKNOWN:
            job.processes.blame(process)
            job.on_end(process)
        else:
            await self._settle_loss(process)

    async def _settle_finished(self, process: RankProcess) -> None:
        job, rank = self._job, process.name.rank
        job.control.report_end(rank, "finished", None)
        if rank in self._dismissed:
            await job.hosts.drain_output([process.name])
            self._remove(process)
            job.board.remove(process.name)

    async def _settle_error(self, process: RankProcess) -> None:
        """Find out whether a process with an error was given up, or lost a peer of its unit."""
        job, name = self._job, process.name
        deadline_s = time.monotonic() + (_PEER_S if job.unit_size > 1 else _DECISION_S)
        await job.hosts.drain_output([name])
        while not self._is_consequence(name) and time.monotonic() < deadline_s:
            if not job.processes.is_consequence(process):
                break
            await asyncio.sleep(0.02)
        if self._is_consequence(name):
            await self._settle_loss(process)
        else:
            job.processes.blame(process)

    def _is_consequence(self, name: ProcessName) -> bool:
        """Return whether a process ended because of another, as we or the coordinator saw it."""
        return name.rank in self._declared or self._has_lost_peer(name)

    def _has_lost_peer(self, name: ProcessName) -> bool:
        """Return whether one of its unit was lost before it, for a reason of its own."""
        first = name.rank - name.number % self._job.unit_size  # their ranks are in a row
        ranks = set(range(first, first + self._job.unit_size)) - {name.rank}
        return name.is_worker and not self._own_losses.isdisjoint(ranks)

    async def _settle_loss(self, process: RankProcess) -> None:
        """Report a loss at once; then remove the process."""
        job, name = self._job, process.name
        assert process.status is not None
        why = job.monitor.diagnosis(process)
        if job.silences.is_stuck(name.rank):
            why = f"stuck without a heartbeat, then {why}"
        is_consequence = process.status.signal is None and self._is_consequence(name)
        kind = LossKind.CRASHED if process.status.signal is None else LossKind.KILLED
        job.control.report_end(name.rank, why, LossKind.LOST_PEER if is_consequence else kind)
        if is_consequence:
            declared = self._declared.get(name.rank, (_RETIRED, LossKind.RETIRED))
            self._evicted.setdefault(name.rank, declared)
        why, kind = self._evicted.get(name.rank, (why, kind))
        if kind.is_own:
            self._own_losses.add(name.rank)
        else:
            job.board.set_state(name.rank, _RETIRED)
        if job.was_member(name.rank):
            job.log_loss(name.rank, why, kind)
        await job.hosts.drain_output([name])
        result = self._remove(process)
        if kind.is_own:
            self.losses.append(result)
        if not job.was_member(name.rank):
            if kind.is_own:
                self.on_failed_start(name, why)
        elif not job.processes.workers:
            await self._await_decision()

    def on_failed_start(self, name: ProcessName, why: str) -> None:
        """Handle a newcomer that ended before it joined, or could not be started (rank -1)."""
        job = self._job
        job.log(f"{name.role} {name.number} ended before it joined: {why}")
        if name.rank >= 0:
            job.control.report_end(name.rank, why, LossKind.ENDED)
        if not job.newcomers.on_failed(name.slot):
            return
        text = f"{MAX_FAILED_STARTS} newcomers in a row ended before they joined as"
        self._give_up(name, f"{text} {name.role} {name.number}, the last one: {why}")

    def _on_unreachable(self, name: ProcessName, why: str) -> None:
        """Let the replacement run on another host; end a job that gets no further with any."""
        job = self._job
        job.hosts.avoid_host_of(name)
        if job.newcomers.on_unreachable(name.slot, job.event_log.step):
            text = f"{name.role} {name.number} and its replacements could not be reached"
            self._give_up(name, f"{text} {MAX_FAILED_STARTS} times without a step, at last: {why}")

    def _give_up(self, name: ProcessName, text: str) -> None:
        """Start no further newcomer for a slot; end the job if it waits for one."""
        if self._job.plan.on_loss == "replace" and not name.is_server:
            self._job.end_job(text)
        else:
            self._job.log(f"{text}; no further one is started")

    def _remove(self, process: RankProcess) -> ProcessResult:
        self._job.monitor.remove(process)
        return self._job.hosts.remove(process)

    # -- the end of the job --------------------------------------------------------------------

    async def await_lost(self) -> None:
        """Wait for the processes whose loss ended the job. The coordinator reports a loss when the
        connection closes, before the process is gone; without this they would seem to fail."""
        deadline_s = time.monotonic() + _DECISION_S
        while time.monotonic() < deadline_s:
            self._job.processes.check()
            if not any(one.name.rank in self._given_up for one in self._job.processes.running):
                return
            await asyncio.sleep(0.02)

    async def _await_decision(self) -> None:
        """The last worker is lost: wait for what the coordinator decides, if it is there."""
        deadline_s = time.monotonic() + _DECISION_S
        while not self._job.is_decided and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        if not self._job.is_decided:
            self._job.end_job("no worker is left")
