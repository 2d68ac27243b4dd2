"""The keeper: supervises a detached job from the background, and can be replaced itself.

Processes of a detached job do not end with their keeper. They write to files instead of pipes, the
job directory stays, and everything that a successor has to know is written down there
(job_facts.py). When the keeper is killed the job goes on without losses being replaced, until
`paceline attach` starts another keeper: it starts the coordinator again, at the same address and
from its journal, and takes hold of the processes by descriptor. Their exit status is then not to be
had: one that left the job in good order counts as finished, one with a traceback at the end of its
log as failed.
"""

from __future__ import annotations

import asyncio
import time

from paceline.control.transport.messages import LossKind
from paceline.launcher.elastic.job import ElasticJob
from paceline.launcher.elastic.job_facts import FoundJob, Record, recorded
from paceline.launcher.job_resources import TakenOver
from paceline.launcher.outcome import Outcome
from paceline.launcher.processes.process import UNKNOWN, AdoptedProcess, ExitStatus, RankProcess
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display

JOB_LOG, EXIT_CODE = "job.log", "exit-code"
_FAREWELL_S = 0.5  # after the end of a process: for the coordinator to say that it had left


class ResumedJob(ElasticJob):
    """A detached job whose keeper was killed, and which goes on under another."""

    def __init__(self, found: FoundJob, spec: RunSpec, display: Display) -> None:
        self._gone: list[int] = []  # ranks that ended while there was no keeper
        facts = found.facts
        super().__init__(spec, facts.environ, display, facts.job_id, TakenOver(found))

    def may_start_again(self, outcome: Outcome) -> bool:
        del outcome  # it was taken over as it was, and has no beginning of its own
        return False

    async def _start_all(self) -> None:
        assert self._control is not None
        for one in recorded(self._directory.path):
            if one.is_alive:
                self._adopt(one)
            else:
                self._gone.append(one.rank)

    def _adopt(self, one: Record) -> None:
        outlet = self._holding.outlet(self._spec, one.seat)
        try:
            process = AdoptedProcess(one.seat, one.pid, outlet)
        except ProcessLookupError:
            outlet.close()
            self._gone.append(one.rank)
            return
        process.outlet.close_far()
        self._host.take_in(process)
        self._board.seat(one.seat)
        self._know(process)

    async def _attach(self) -> None:
        await super()._attach()
        assert self._control is not None
        for rank in self._gone:
            if self._was_in(rank):
                self._control.report_end(rank, "it ended while nobody watched", LossKind.ENDED)

    def _on_end(self, process: RankProcess) -> None:
        if process.status != UNKNOWN:
            super()._on_end(process)
        elif not self._is_ending:
            self._crew.excuse(process)
            self._spawn(self._settle_unknown(process))

    async def _settle_unknown(self, process: RankProcess) -> None:
        """Find out how a process ended that was not our child."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while process.seat.rank not in self._left and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        await self._host.drained([process.seat])
        rank = process.seat.rank
        if self._crew.has_traceback(process):
            process.status = ExitStatus(1)
        elif rank in self._left or rank in self._dismissed:
            process.status = ExitStatus(0)
        if process.status != UNKNOWN:
            self._crew.blame(process)
            super()._on_end(process)
        else:
            await self._settle_loss(process)
