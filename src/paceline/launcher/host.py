"""The processes of a job on this host: started, watched, stopped, killed, and none left behind.

A host does what it is told and decides nothing. It starts processes
(launcher/processes/spawner.py), knows them by rank with their output and their end
(launcher/processes/table.py), holds the guard that ends them if the launcher is killed
(launcher/processes/lifeline.py), and finds what they have left behind. When a job is over, who is
replaced and who has to go is decided by jobs: local.py, elastic/job.py.

Threads: used on the launcher's main thread only.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping

from paceline.launcher.outcome import RankResult
from paceline.launcher.processes.guard import end_processes
from paceline.launcher.processes.lifeline import Guard, Sessions
from paceline.launcher.processes.output import RankOutput
from paceline.launcher.processes.pipes import Outlet
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.processes.spawner import Spawner
from paceline.launcher.processes.table import Crew
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display
from paceline.runtime.process_names import Seat

# How long after its end a rank's pipes may stay open (something it started may hold them).
_DRAIN_S = 0.5
_END_S = 0.8  # for processes that were killed to be gone


class Host:
    """The processes of one job here; `on_end` is called once for each that has ended."""

    def __init__(
        self,
        spec: RunSpec,
        job_id: str,
        display: Display,
        on_end: Callable[[RankProcess], None],
        on_change: Callable[[], None],
        *,
        say: Callable[[str], None],
    ) -> None:
        self.crew: Crew[RankProcess] = Crew(on_end)
        self._display = display
        self._outputs: dict[int, RankOutput] = {}  # by rank
        self._job_id, self._on_change, self._say = job_id, on_change, say
        self._spawner = Spawner(spec, say)
        self._guard = Sessions()
        self.others: Callable[[], set[int | None]] = set  # pids of further children of this process

    # -- start -------------------------------------------------------------------------------

    def prepare(self, environ: Mapping[str, str]) -> None:
        """Begin to import what processes will need, with the environment of a worker."""
        self._spawner.warm_up(environ)

    def guard(self, guard: Sessions) -> None:
        """Put all processes under this guard, and see their ends from now on."""
        self._guard = guard
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.look)

    async def start(self, seat: Seat, environ: dict[str, str], outlet: Outlet) -> RankProcess:
        """Start a process, and take it in; raises LaunchError."""
        process = await self._spawner.start(seat, environ, outlet)
        self.take_in(process)
        return process

    def take_in(self, process: RankProcess) -> None:
        """Take in a process that was started here, also by another launcher."""
        self._guard.watch(process.pid)
        self.crew.add(process)
        self._outputs[process.seat.rank] = RankOutput(process, self._display)

    def expect_no_more(self) -> None:
        """Let go of what further processes would be started from."""
        self._spawner.close()

    # -- watch -------------------------------------------------------------------------------

    def look(self) -> None:
        """See who has ended since the last look, and reap what nobody waits for."""
        self.crew.look()
        guard = self._guard.pid if isinstance(self._guard, Guard) else None
        self._spawner.reap_orphans({*self.crew.pids, *self.others(), guard})
        self._on_change()

    async def drained(self, seats: Iterable[Seat]) -> None:
        """Wait until the output of ended processes is read, but not for ever."""
        waits = [asyncio.ensure_future(self._outputs[seat.rank].done.wait()) for seat in seats]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_DRAIN_S)
            for wait in late:
                wait.cancel()

    # -- end ---------------------------------------------------------------------------------

    def retire(self, process: RankProcess) -> RankResult:
        """Let go of one that has ended while the job goes on; what it started ends as well."""
        process.signal_group(signal.SIGKILL)
        end_processes("", [process.pid], within_s=0.05)
        self._outputs.pop(process.seat.rank).close()
        result = self.crew.remove(process)
        self._guard.forget(process.pid)
        return result

    async def end_all(self) -> None:
        """Leave nothing behind; also when starting failed half-way."""
        await self.drained(process.seat for process in self.crew.ended)
        self.crew.kill()
        for pid in end_processes(self._job_id, self._guard.sessions, within_s=_END_S):
            self._say(f"process {pid} is stuck in the kernel and could not be ended")
        self.look()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for output in self._outputs.values():
            output.close()
        self.crew.release()

    def close(self) -> None:
        """End what this host has started for itself; call last."""
        self._spawner.close()
        self._guard.end()
