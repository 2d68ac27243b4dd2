"""Hosts that an engine finds while an elastic job runs: taken, asked for, and given back.

    a host with room        its agent is connected; open slots are filled; if the job asked for more
                            workers than there was room for, it now has them
    a process without room  the engine is asked for room; the process waits, and is no failure
    workers that leave      their room is given back, and the agents of hosts without any end

Threads: the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

from paceline.control.operator_messages import Status
from paceline.errors import PacelineError
from paceline.launcher.engines.engine import SupplyingEngine
from paceline.runtime.process_names import ProcessName

if TYPE_CHECKING:
    from paceline.launcher.elastic.job import ElasticJob

_TICK_S = 0.1
_LEAVE_S = 40.0  # for workers that are no longer wanted to exit


class HostSupply:
    """The engine of one elastic job as a source of hosts."""

    def __init__(self, job: ElasticJob, engine: SupplyingEngine) -> None:
        self._job, self._engine = job, engine
        self._workers = job.plan.max_workers  # as many as the engine was asked for
        self._told: set[tuple[int, int]] = set()  # slots that wait for room
        self._more = 0, 0  # workers and servers whose replacements need room before they leave
        self._taking = asyncio.ensure_future(self._take_hosts())

    def close(self) -> None:
        self._taking.cancel()

    async def _take_hosts(self) -> None:
        while (await self._job.control.status()).membership is None:
            await asyncio.sleep(_TICK_S)  # the first workers are still joining
        await self._fill()  # there may be more room than the first workers take
        while True:
            host = await self._engine.next_host()
            try:
                line = await self._job.hosts.accept_host(host)
                if line:
                    self._job.log(line)
                await self._fill()
            except PacelineError as error:
                self._job.log(str(error))

    async def _fill(self) -> None:
        """Let processes join that had no room."""
        job, status = self._job, await self._job.control.status()
        target = min(self._workers, job.hosts.num_slots)
        target -= target % job.unit_size
        if target > status.num_workers and not job.is_ending:
            await job.control.scale(target)
        job.newcomers.forgive()
        for wanted in await job.control.wanted():
            job.on_wanted(wanted)

    def has_room(self, name: ProcessName) -> bool:
        """Return whether a newcomer can start now; if not, ask the engine for room."""
        if self._job.hosts.has_room(name):
            self._told.discard(name.slot)
            return True
        if name.slot not in self._told:
            self._told.add(name.slot)
            self._job.log(
                f"{name.role} {name.number} waits until {self._engine.name} has room for it"
            )
            self._job.start_task(self._ask())
        return False

    async def _ask(self) -> None:
        status = await self._job.control.status()
        self._workers = max(self._workers, status.num_workers)
        self._want(status)

    async def give_back(self) -> None:
        """Give back the room of workers that are no longer wanted, when they have left."""
        job, deadline_s = self._job, time.monotonic() + _LEAVE_S
        wanted = self._workers = (await job.control.status()).num_workers
        while len(job.processes.workers) > wanted and time.monotonic() < deadline_s:
            await asyncio.sleep(_TICK_S)
        if not job.is_ending:
            self._want(await job.control.status())

    def ask_for_more(self, workers: int, servers: int) -> None:
        """Ask for room for replacements while those that they replace still run; 0: no more."""
        self._more = workers, servers
        self._job.start_task(self._ask())

    def _want(self, status: Status) -> None:
        busy = Counter(process.host_name for process in self._job.processes.workers)
        workers, servers = self._more
        self._engine.want(self._workers + workers, status.num_servers + servers, busy)
