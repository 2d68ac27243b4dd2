"""The launcher's side of one other host: its agent, and its processes as the launcher knows them.

A RemoteProcess stands in the job's table like a local one. Its signals become messages to the
agent; its output, exit and state arrive as messages. If the agent's connection or the engine's
command ends, the host counts as lost, and all its processes with it: the agent, or its guard, ends
them there as soon as it notices.

Threads: the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import DEAD_AFTER_S
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.hosts import messages as m
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.job_registry import JobFacts
from paceline.launcher.preemption.notice import Notice
from paceline.launcher.processes.output import OutputSink
from paceline.launcher.processes.process import ExitStatus, ProcessOutput, RankProcess
from paceline.launcher.processes.table import ProcessResult, ProcessTable
from paceline.runtime.process_names import ProcessName

_START_S = 90.0  # for one process: the template may still be importing
_PING_S = 0.25
_SILENT_S = 5.0  # of an agent; then a line reports it
_GIVE_UP_S = 30.0  # then nothing that happens on its host would be known for ever
_DRAIN_S = 1.0
_END_S = 4.0  # for the agent to end all its processes
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class RemoteProcess(RankProcess):
    """A process on another host. Its exit is what the agent reports, or the loss of its host."""

    def __init__(
        self, name: ProcessName, pid: int, host: HostSlots, send: Callable[[m.ToAgent], None]
    ) -> None:
        super().__init__(name, pid, ProcessOutput.elsewhere())
        self.host_name = host.name
        self._send = send
        self.report: m.ProcessReport | None = None  # the last one
        self.exit: ExitStatus | None = None
        self.last_diagnosis = ""  # of its exit
        self.open_streams = {False, True}
        self.has_all_output = asyncio.Event()

    @property
    def session(self) -> int | None:
        return None

    def _peek(self) -> ExitStatus | None:
        return self.exit

    def signal_group(self, number: signal.Signals) -> None:
        self._send(m.Kill(self.name.rank, int(number)))

    def is_frozen(self) -> bool:
        return self.report is not None and self.report.stopped_s is not None

    @property
    def is_exiting(self) -> bool:
        return self.exit is not None or (self.report is not None and self.report.is_exiting)

    def describe_state(self) -> str:
        where = f"on host {self.host_name}"
        return f"{self.report.state} {where}" if self.report is not None else f"it runs {where}"

    @property
    def shows_stacks(self) -> bool:
        return self.report is not None and self.report.shows_stacks

    def ask_for_stacks(self) -> None:
        if self.shows_stacks:
            self.was_asked_for_stacks = True
            self._send(m.AskForStacks(self.name.rank))

    def end_stream(self, is_error: bool) -> None:
        self.open_streams.discard(is_error)
        if not self.open_streams:
            self.has_all_output.set()

    def release(self) -> None:
        self._presume_killed()


class RemoteSigns:
    """What the agent reports about one process (see processes/monitor.py)."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process = process

    def poll(self, now_s: float) -> None:
        """Do nothing: the agent reports the state."""

    def stopped_for_s(self, now_s: float) -> float | None:
        del now_s
        report = self._process.report
        return None if report is None else report.stopped_s

    def busy_s(self) -> float | None:
        report = self._process.report
        return None if report is None else report.busy_s

    def diagnosis(self, status: ExitStatus) -> str:
        return self._process.last_diagnosis or str(status)

    def reason(self, status: ExitStatus) -> str:
        del status
        return self._process.reason


class RemoteHost:
    """One other host; `on_change` is called when a process may have ended."""

    def __init__(
        self,
        host: HostSlots,
        processes: ProcessTable[RankProcess],
        sink: Callable[[RankProcess], OutputSink],
        on_change: Callable[[], None],
        *,
        log: Callable[[str], None],
    ) -> None:
        self.host, self.processes = host, processes
        self._sink, self._on_change, self._log = sink, on_change, log
        self._channel: Channel[m.FromAgent] | None = None
        self.facts: asyncio.Future[m.HostFacts] = asyncio.get_running_loop().create_future()
        self._probed: asyncio.Future[m.Probed] | None = None
        self._starting: dict[int, asyncio.Future[int]] = {}  # by rank: the pid
        self._mine: dict[int, RemoteProcess] = {}  # by rank
        self._sinks: dict[int, OutputSink] = {}
        self._ended: asyncio.Future[tuple[int, ...]] | None = None
        self._heard_s = time.monotonic()
        self._is_silent = False
        self.why_lost = ""
        self.on_interrupt: Callable[[], None] = lambda: None
        self.on_notice: Callable[[Notice], None] = lambda _: None

    @property
    def is_alive(self) -> bool:
        return self._channel is not None and not self.why_lost

    # -- the connection ----------------------------------------------------------------------

    async def serve(self, channel: Channel[m.FromAgent]) -> None:
        """Serve a connection of the agent until it ends."""
        try:
            facts = await channel.receive()
            if not isinstance(facts, m.HostFacts) or self._channel is not None:
                return
        except (EOFError, OSError, PacelineError):
            return  # the agent tried several addresses and uses another one
        self._channel = channel
        if not self.facts.done():
            self.facts.set_result(facts)
        pinging = asyncio.ensure_future(self._ping())
        why = "the connection to its agent ended"
        try:
            while True:
                self._on_message(await channel.receive())
                await self._keep_up()
        except EOFError:
            pass
        except (OSError, PacelineError) as error:
            why = _why_broken(error)
        finally:
            pinging.cancel()
            channel.close()
            self.lose(why)

    async def _keep_up(self) -> None:
        """Read no further while the display lags; the agent then reads no output either."""
        while any(sink.is_behind for sink in self._sinks.values()):
            await asyncio.sleep(0.05)

    async def _ping(self) -> None:
        while True:
            self._send(m.Ping())
            silent_s = time.monotonic() - self._heard_s
            if silent_s > _SILENT_S and not self._is_silent:
                self._is_silent = True
                self._log(
                    f"the agent on host {self.host.name} has sent nothing for {silent_s:.0f} s; it"
                    " may be stopped. Its processes continue"
                )
            if silent_s > _GIVE_UP_S:
                self.lose(f"its agent has sent nothing for {silent_s:.0f} s")
            await asyncio.sleep(_PING_S)

    def lose(self, why: str) -> None:
        """Count the host as lost, once, unless the job is ending."""
        if self._ended is not None:
            if not self._ended.done():
                self._ended.set_result(())
            return
        if self.why_lost:
            return
        self.why_lost = why
        if self._channel is not None:
            self._channel.close()
        for future in self._starting.values():
            if not future.done():
                future.set_exception(LaunchError(f"host {self.host.name} is lost: {why}"))
        if self._probed is not None and not self._probed.done():
            self._probed.set_exception(LaunchError(f"host {self.host.name} is lost: {why}"))
        for process in self._mine.values():
            if process.exit is None:
                text = f"host {self.host.name} is lost ({why})"
                process.exit = ExitStatus(None, signal.SIGKILL, text)
                self._end_output(process)
        self._on_change()

    def _send(self, message: m.ToAgent) -> None:
        if self._channel is not None and not self.why_lost:
            with suppress(OSError, PacelineError):  # `serve` notices a broken connection
                self._channel.send(message)

    # -- messages ----------------------------------------------------------------------------

    def _on_message(self, message: m.FromAgent) -> None:
        self._heard_s = time.monotonic()
        if self._is_silent:
            self._is_silent = False
            self._log(f"the agent on host {self.host.name} answers again")
        if isinstance(message, m.Poll):
            for report in message.processes:
                if report.rank in self._mine:
                    self._mine[report.rank].report = report
        elif isinstance(message, m.Output):
            self._on_output(message)
        elif isinstance(message, m.Exited):
            self._on_exit(message)
        elif isinstance(message, m.Started):
            self._resolve(message.rank, message.pid)
        elif isinstance(message, m.NotStarted):
            self._resolve(message.rank, LaunchError(f"host {self.host.name}: {message.error}"))
        elif isinstance(message, m.Probed) and self._probed is not None:
            self._probed.set_result(message)
        elif isinstance(message, m.AskedToStop):
            self.on_interrupt()
        elif isinstance(message, m.HostLeaves):
            self.on_notice(
                Notice(message.why, message.within_s, message.is_withdrawn, message.is_for_job)
            )
        elif isinstance(message, m.Said):
            self._log(f"host {self.host.name}: {message.text}")
        elif isinstance(message, m.AllEnded) and self._ended is not None:
            self._ended.set_result(message.pids)

    def _resolve(self, rank: int, answer: int | LaunchError) -> None:
        future = self._starting.pop(rank, None)
        if future is None or future.done():
            return
        if isinstance(answer, LaunchError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _on_output(self, message: m.Output) -> None:
        process = self._mine.get(message.rank)
        if process is None:
            return
        if message.data:
            self._sinks[message.rank].feed(message.is_error, message.data)
        else:
            self._sinks[message.rank].finish(message.is_error)
            process.end_stream(message.is_error)

    def _on_exit(self, message: m.Exited) -> None:
        process = self._mine.get(message.rank)
        if process is not None:
            process.exit = ExitStatus(message.code, message.signal)
            process.last_diagnosis, process.reason = message.diagnosis, message.reason
            self._on_change()

    # -- processes ---------------------------------------------------------------------------

    async def probe(self, targets: Iterable[m.ProbeTarget]) -> m.Probed:
        """Let the host connect to other hosts; return what it found. Raises LaunchError."""
        self._probed = asyncio.get_running_loop().create_future()
        self._send(m.Probe(tuple(targets)))
        return await self._probed

    async def start(self, name: ProcessName, environ: dict[str, str]) -> RemoteProcess:
        """Start a process there and add it; raises LaunchError."""
        if not self.is_alive:
            raise LaunchError(f"host {self.host.name} is lost: {self.why_lost}")
        future = self._starting[name.rank] = asyncio.get_running_loop().create_future()
        # Known before the agent answers: its first output may come with the answer.
        process = RemoteProcess(name, 0, self.host, self._send)
        self._mine[name.rank], self._sinks[name.rank] = process, self._sink(process)
        self._send(m.Start.of(name, environ))
        try:
            process.pid = await asyncio.wait_for(future, _START_S)
        except (asyncio.TimeoutError, LaunchError) as error:
            del self._mine[name.rank], self._sinks[name.rank]
            if isinstance(error, LaunchError):
                raise
            raise LaunchError(
                f"{name} could not be started on host {self.host.name}: its agent has not answered"
                f" for {_START_S:g} s"
            ) from None
        self.processes.add(process)
        if process.exit is not None:  # it was reported before the table knew the process
            asyncio.get_running_loop().call_soon(self._on_change)
        return process

    def publish(self, facts: JobFacts) -> None:
        """Let the host know the facts of the job."""
        self._send(m.Publish(msgspec.json.encode(facts)))

    def expect_no_more(self) -> None:
        self._send(m.ExpectNoMore())

    async def drain_output(self, those: Iterable[ProcessName]) -> None:
        """Wait until the output of ended processes of this host has arrived, at most 1 s."""
        found = [self._mine[name.rank] for name in those if name.rank in self._mine]
        waits = [asyncio.ensure_future(one.has_all_output.wait()) for one in found]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_DRAIN_S)
            for wait in late:
                wait.cancel()

    def signs(self, process: RankProcess) -> RemoteSigns:
        """Return what this host reports about one of its processes."""
        return RemoteSigns(self._mine[process.name.rank])

    def remove(self, process: RankProcess) -> ProcessResult:
        """Remove one that has ended while the job continues; what it started ends as well."""
        rank = process.name.rank
        self._send(m.Remove(rank))
        self._end_output(self._mine[rank])
        del self._mine[rank], self._sinks[rank]
        return self.processes.remove(process)

    def _end_output(self, process: RemoteProcess) -> None:
        for is_error in sorted(process.open_streams):
            self._sinks[process.name.rank].finish(is_error)
            process.end_stream(is_error)

    # -- end ---------------------------------------------------------------------------------

    async def dismiss(self, why: str) -> None:
        """End every process there while the job continues: they count as lost with their host."""
        if self.is_alive:
            self._send(m.EndAll())
            self.lose(why)

    async def end_all(self) -> tuple[int, ...]:
        """End every process there and the agent; return the pids that could not be ended."""
        if not self.is_alive:
            return ()
        self._ended = asyncio.get_running_loop().create_future()
        self._send(m.EndAll())
        try:
            left = await asyncio.wait_for(asyncio.shield(self._ended), _END_S)
        except asyncio.TimeoutError:
            self._log(
                f"the agent on host {self.host.name} has not ended its processes in {_END_S:g} s;"
                " it ends them when its connection closes"
            )
            left = ()
        for process in self._mine.values():
            self._end_output(process)
        return left


def _why_broken(error: OSError | PacelineError) -> str:
    """Return why the connection to an agent broke."""
    if isinstance(error, OSError) and error.errno in _NO_ANSWER:
        return f"no answer from it for {DEAD_AFTER_S:g} s: it is down, or its network"
    words = error.strerror if isinstance(error, OSError) else None
    return f"the connection to its agent broke: {words or error}"
