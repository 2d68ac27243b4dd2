"""A host: starts, watches and stops the processes of a job on this machine, and leaves none.

A host does what its job asks and decides nothing. It starts processes (processes/spawner.py), puts
them into the job's table with their output and their exit (processes/table.py), and ends them. The
launcher has one for its own machine; the agent on another machine has one too (hosts/agent.py).
Jobs (job.py, elastic/job.py) decide when a job is over, which process is replaced and which is
killed.

Threads: used on the main thread only.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from paceline.errors import LaunchError
from paceline.launcher.processes.forked_child import ForkedChild
from paceline.launcher.processes.guard import Sessions
from paceline.launcher.processes.guard_main import end_processes
from paceline.launcher.processes.output import OutputReader, OutputSink
from paceline.launcher.processes.process import ProcessOutput, RankProcess
from paceline.launcher.processes.run_script import Command
from paceline.launcher.processes.spawner import Spawner
from paceline.launcher.processes.table import ProcessResult, ProcessTable
from paceline.launcher.spec import RunSpec
from paceline.launcher.template_imports import first_imports, modules_to_import
from paceline.runtime.process_names import ProcessName

# How long after its exit the pipes of a process may stay open (a helper of it may hold them).
_DRAIN_S = 0.5
_END_S = 0.8  # for killed processes to be gone
# The end of a job reads /proc and removes files. If the job ends because the launcher has no
# descriptors left, it uses these.
_NUM_SPARE_FDS = 4


class ProcessHost:
    """The processes of one job on this machine; `sink` returns what takes a process's output."""

    def __init__(
        self,
        spec: RunSpec,
        processes: ProcessTable[RankProcess],
        sink: Callable[[RankProcess], OutputSink],
        on_change: Callable[[], None],
        *,
        log: Callable[[str], None],
    ) -> None:
        self.processes = processes
        self._spec, self._sink = spec, sink
        self._readers: dict[int, OutputReader] = {}  # by rank
        self._on_change, self._log = on_change, log
        self._spawner = Spawner(log, dies_with_launcher=not spec.is_detached)
        self.other_children: Callable[[], set[int | None]] = set  # their pids
        self._may_reap = True
        self._spare_fds: list[int] = []  # for `end_all`

    # -- start -------------------------------------------------------------------------------

    def start_template(self, environ: Mapping[str, str]) -> None:
        """Begin to import what processes will need, with the environment of a worker."""
        spec = self._spec
        modules = modules_to_import(spec) if spec.uses_template_in(environ) else ()
        if modules:
            commands = [spec.command(name) for name in spec.process_names]
            self._spawner.start_template(modules, environ, commands)

    def watch(self, guard: Sessions) -> None:
        """Put all processes under this guard, and notice their exits from now on.

        Raises LaunchError if the launcher has too few file descriptors to end the job later.
        """
        self.processes.guard = guard
        try:
            for _ in range(_NUM_SPARE_FDS):
                self._spare_fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self._release_spare_fds()
            raise LaunchError(
                f"the launcher cannot watch its processes: {error.strerror}; raise the limit of"
                " open files (ulimit -n)"
            ) from error
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.check)

    async def start(
        self, name: ProcessName, environ: dict[str, str], output: ProcessOutput
    ) -> RankProcess:
        """Start a process and add it; raises LaunchError."""
        command = self._spec.command(name)
        process = await self._spawner.start(name, command, environ, output)
        self.add(process)
        if name.is_newcomer:
            await self.prepare_newcomers()
        return process

    async def prepare_newcomers(self) -> None:
        """Begin to import what the script imports first, for newcomers. Logs if it cannot."""
        try:
            await self._spawner.prepare(first_imports(self._spec))
        except LaunchError as error:
            self._log(str(error))

    async def fork_child(
        self, command: Command, environ: Mapping[str, str], outputs: tuple[int, int], kept_fd: int
    ) -> ForkedChild | None:
        """Fork a process of the job that is no rank; None if there is no template."""
        return await self._spawner.fork_child(command, environ, outputs, kept_fd)

    def add(self, process: RankProcess) -> None:
        """Add a process that runs on this host; a former supervisor may have started it."""
        self.processes.add(process)
        self._readers[process.name.rank] = OutputReader(process, self._sink(process))

    def expect_no_more(self) -> None:
        """End the template: no further process will be started."""
        self._spawner.close()

    # -- watch -------------------------------------------------------------------------------

    def check(self) -> None:
        """Notice exits since the last call, and reap orphans."""
        table = self.processes
        table.check()
        if self._may_reap:
            self._spawner.reap_orphans({*table.pids, *self.other_children(), table.guard.pid})
        self._on_change()

    @contextmanager
    def reaping_paused(self) -> Iterator[None]:
        """Reap no orphans: other code starts children whose pids are not known yet."""
        self._may_reap = False
        try:
            yield
        finally:
            self._may_reap = True

    async def drain_output(self, those: Iterable[ProcessName]) -> None:
        """Wait until the output of ended processes of this host is read, at most 0.5 s."""
        found = [self._readers[name.rank] for name in those if name.rank in self._readers]
        waits = [asyncio.ensure_future(reader.done.wait()) for reader in found]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_DRAIN_S)
            for wait in late:
                wait.cancel()

    # -- end ---------------------------------------------------------------------------------

    def remove(self, process: RankProcess) -> ProcessResult:
        """Remove one that has ended while the job continues; what it started ends as well."""
        process.signal_group(signal.SIGKILL)
        end_processes("", [process.pid], within_s=0.05)
        self._readers.pop(process.name.rank).close()
        return self.processes.remove(process)

    async def end_all(self) -> list[int]:
        """End every process; also if only some of them were started. Return the pids left."""
        self._release_spare_fds()
        await self.drain_output(process.name for process in self.processes.ended)
        left = self.processes.kill_all(within_s=_END_S)
        self.check()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for reader in self._readers.values():
            reader.close()
        return left

    def _release_spare_fds(self) -> None:
        while self._spare_fds:
            os.close(self._spare_fds.pop())

    def close(self) -> None:
        """End the template and the guard; call last."""
        self._spawner.close()
        self.processes.guard.end()
