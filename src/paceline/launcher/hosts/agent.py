"""The agent: does on its host what the launcher does on its own machine.

    invitation on stdin -> connect to the launcher -> facts -> probes -> processes -> end

The launcher starts one agent on each other host, through an engine (launcher/engines/). The agent
starts, watches and ends processes with a `ProcessHost`, and reports everything to the launcher; it
decides nothing. It lives as long as its launcher: when standard input ends or the connection
breaks, it ends every process of the job on its host, and itself. If the agent is killed, the guard
does that.

Threads: one loop on the main thread.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from paceline import __version__
from paceline.control.transport.acceptor import Wire, introduce_control
from paceline.control.transport.auth import CallerHandshake, Session, write_private
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import connect_tcp, die_soon
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.host import ProcessHost
from paceline.launcher.hosts import messages as m
from paceline.launcher.hosts.host_environment import environ_on_host
from paceline.launcher.hosts.reach import ProbeListener, local_addresses, probe
from paceline.launcher.hosts.repeated_output import RepeatedOutput
from paceline.launcher.job_directory import JobDirectory
from paceline.launcher.job_registry import JobFacts, decode_spec, write_facts
from paceline.launcher.preemption.notice import Notice, NoticeSource
from paceline.launcher.preemption.poller import NoticePoller
from paceline.launcher.processes.guard import Guard
from paceline.launcher.processes.monitor import ProcessMonitor
from paceline.launcher.processes.output import OutputSink
from paceline.launcher.processes.process import ProcessOutput, RankProcess
from paceline.launcher.processes.table import ProcessTable
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import (
    encryption,
    inherited_environ,
    natural_host_id,
    runtime_dir,
    set_encryption,
)
from paceline.runtime.console import warn
from paceline.runtime.machine import memory, processor_s, usable_cores

_CONNECT_S = 8.0
_POLL_S = 0.25
_STOPPED_S = 35  # after the launcher has given the host up (remote_host.py)
_BACKLOG_BYTES = 4 << 20  # while the launcher has more to read, no output is read
# The launcher decides what follows: workers may save or leave first. It ends this agent, too.
_ASKED: dict[signal.Signals, m.FromAgent] = {
    signal.SIGINT: m.AskedToStop(),
    signal.SIGTERM: m.HostLeaves("its agent got SIGTERM", is_for_job=True),
    signal.SIGPWR: m.HostLeaves("its pod is to end"),
    # Slurm signals all processes of a step at once. This signal does nothing to the others.
    signal.SIGURG: m.HostLeaves("its agent got SIGURG"),
}
_decoder: msgspec.msgpack.Decoder[m.ToAgent] = msgspec.msgpack.Decoder(m.ToAgent)


class Agent:
    """Serves one job on this host; `run` is called once."""

    def __init__(self, invitation: m.Invitation) -> None:
        self._invitation = invitation
        self._secret = bytes.fromhex(invitation.secret)
        self._channel: Channel[m.ToAgent]
        self._processes: ProcessTable[RankProcess] = ProcessTable(invitation.job_id, self._on_end)
        self._monitor = ProcessMonitor()
        self._host: ProcessHost | None = None
        set_encryption(encryption(invitation.environ))  # that of the job, not of this host
        self._environ = inherited_environ()
        self._secret_file: Path
        self._source: NoticeSource | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Serve until the launcher ends the job or is gone; raises LaunchError."""
        self._channel, reached = await self._connect()
        probes = ProbeListener(self._secret, self._invitation.job_id, self._invitation.host_index)
        with ExitStack() as held:
            try:
                probes.open(self._addresses())
                problems = self._prepare(held)
                self._send(self._facts(reached, probes.addresses, problems))
                self._watch_stdin()
                for number, ask in _ASKED.items():
                    asyncio.get_running_loop().add_signal_handler(number, self._send, ask)
                self._start_task(self._listen())
                if self._source is not None:
                    self._start_task(NoticePoller(self._source, self._on_notice, self._say).watch())
                self._start_task(self._poll())
                await self._over.wait()
            finally:
                await self._end(probes)

    # -- start -------------------------------------------------------------------------------

    async def _connect(self) -> tuple[Channel[m.ToAgent], list[str]]:
        """Connect to the launcher; return the channel and all addresses that answered."""
        addresses = self._invitation.addresses
        tries = [asyncio.wait_for(self._introduce(one), _CONNECT_S) for one in addresses]
        found = await asyncio.gather(*tries, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(
                error, (OSError, PacelineError, asyncio.TimeoutError)
            ):
                raise error
        good = [(a, one) for a, one in zip(addresses, found, strict=True) if isinstance(one, tuple)]
        if not good:
            words = "; ".join(f"{a}: {_words(e)}" for a, e in zip(addresses, found, strict=True))
            raise LaunchError(
                f"host {self._invitation.host_name} cannot reach the launcher ({words}); check"
                " firewalls between the hosts"
            )
        for _, (wire, _) in good[1:]:
            wire.close()
        channel = await Channel.over(*good[0][1], _decoder)
        die_soon(channel.socket)
        return channel, [address for address, _ in good]

    async def _introduce(self, address: str) -> tuple[Wire, Session]:
        handshake = CallerHandshake(
            self._secret,
            job_id=self._invitation.job_id,
            listener=m.LAUNCHER,
            role=m.ROLE,
            rank=self._invitation.host_index,
            purpose="control",
        )
        sock = await connect_tcp(address)
        return await introduce_control(sock, handshake, what=f"the launcher at {address}")

    def _addresses(self) -> list[str]:
        """Return the addresses of this host, first the one towards the launcher."""
        return list(dict.fromkeys([self._channel.local_address, *local_addresses()]))

    def _prepare(self, held: ExitStack) -> list[str]:
        """Create what processes need here, and start the template; return the problems."""
        try:
            spec = replace(decode_spec(self._invitation.spec), is_detached=False)
            directory = held.enter_context(JobDirectory(Path(runtime_dir(self._environ))))
            self._secret_file = directory.path / "secret"
            write_private(self._secret_file, self._invitation.secret.encode() + b"\n")
            guard = Guard(self._invitation.job_id, directory.path, stopped_s=_STOPPED_S)
        except PacelineError as error:
            return [str(error)]
        self._source = spec.notice_source
        self._host = self._open_host(spec)
        held.callback(self._host.close)
        self._host.watch(guard)
        self._host.start_template(environ_on_host(self._environ, self._invitation.environ))
        return []

    def _open_host(self, spec: RunSpec) -> ProcessHost:
        def sink(process: RankProcess) -> OutputSink:
            forwarded = ForwardedOutput(process, self._channel, self._send)
            has_logs = spec.engine == "ray"  # those of the actor that runs this agent
            return RepeatedOutput(process.name, forwarded) if has_logs else forwarded

        return ProcessHost(
            spec,
            self._processes,
            sink,
            lambda: None,
            log=self._say,
        )

    def _facts(
        self, reached: Sequence[str], addresses: Sequence[str], problems: Sequence[str]
    ) -> m.HostFacts:
        shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
        return m.HostFacts(
            hostname=socket.gethostname(),
            host_id=natural_host_id(),
            version=__version__,
            python=f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}",
            pid=os.getpid(),
            cores=usable_cores(),
            memory_bytes=memory().available_bytes or 0,
            shm_bytes=shm.f_bavail * shm.f_frsize if shm is not None else 0,
            clock_s=time.time(),
            launcher=tuple(reached),
            addresses=tuple(addresses),
            problems=tuple(problems),
        )

    # -- serve -------------------------------------------------------------------------------

    def _watch_stdin(self) -> None:
        """End with the launcher: its process, its terminal or the engine's connection is gone."""
        loop = asyncio.get_running_loop()
        fd = sys.stdin.fileno()

        def on_readable() -> None:
            if not os.read(fd, 1 << 12):
                loop.remove_reader(fd)
                self._over.set()

        loop.add_reader(fd, on_readable)

    def _on_notice(self, notice: Notice) -> None:
        self._send(m.HostLeaves(notice.why, notice.within_s, notice.is_withdrawn))

    def _say(self, text: str) -> None:
        self._send(m.Said(text))

    async def _listen(self) -> None:
        try:
            while not self._over.is_set():
                self._on_message(await self._channel.receive())
        except (EOFError, OSError):
            pass  # the launcher is gone
        except PacelineError as error:
            warn(f"host {self._invitation.host_name}: {error}")
        finally:
            self._over.set()

    def _on_message(self, message: m.ToAgent) -> None:
        if isinstance(message, m.Probe):
            self._start_task(self._probe(message))
        elif isinstance(message, m.Start):
            self._start_task(self._start(message))
        elif isinstance(message, m.Publish):
            self._publish(message)
        elif isinstance(message, m.ExpectNoMore) and self._host is not None:
            self._host.expect_no_more()
        elif isinstance(message, m.EndAll):
            self._over.set()
        elif isinstance(message, (m.Kill, m.AskForStacks, m.Remove)):
            process = self._processes.find(message.rank)
            if process is not None:
                self._act(message, process)

    def _act(self, message: m.Kill | m.AskForStacks | m.Remove, process: RankProcess) -> None:
        if isinstance(message, m.Kill):
            process.signal_group(signal.Signals(message.signal))
        elif isinstance(message, m.AskForStacks):
            process.ask_for_stacks()
        elif not process.is_running and self._host is not None:
            self._monitor.remove(process)
            self._host.remove(process)

    def _publish(self, message: m.Publish) -> None:
        facts = msgspec.json.decode(message.facts, type=JobFacts)
        facts = msgspec.structs.replace(
            facts,
            secret_file=str(self._secret_file),
            supervisor=os.getpid(),
            host=socket.gethostname(),
            is_detached=False,  # an agent ends with its launcher
            stop_signal=int(signal.SIGINT),  # SIGTERM means that its host goes away
        )
        write_facts(self._secret_file.parent, facts)

    async def _probe(self, message: m.Probe) -> None:
        one = self._invitation
        results = await probe(message.targets, self._secret, one.job_id, one.host_index)
        self._send(m.Probed(tuple(results)))

    async def _start(self, message: m.Start) -> None:
        assert self._host is not None, "the launcher starts nothing on a host with problems"
        environ = environ_on_host(self._environ, message.environ)
        environ["PACELINE_SECRET_FILE"] = str(self._secret_file)
        try:
            process = await self._host.start(message.name, environ, ProcessOutput.pipes())
        except LaunchError as error:
            self._send(m.NotStarted(message.rank, str(error)))
            return
        self._monitor.add(process)
        self._send(m.Started(message.rank, process.pid))

    async def _poll(self) -> None:
        while True:
            if self._host is not None:
                self._host.check()
            running = self._processes.running
            stopped = self._monitor.poll(running, time.monotonic())
            self._send(m.Poll(tuple(_report(p, stopped[p.name.rank]) for p in running)))
            await asyncio.sleep(_POLL_S)

    def _on_end(self, process: RankProcess) -> None:
        status = process.status
        assert status is not None
        diagnosis, reason = self._monitor.diagnosis(process), self._monitor.reason(process)
        if status.signal == signal.SIGKILL and not reason:
            reason = "by another process; no sign of the OOM killer on its host"
        self._send(m.Exited(process.name.rank, status.code, status.signal, diagnosis, reason))

    # -- end ---------------------------------------------------------------------------------

    async def _end(self, probes: ProbeListener) -> None:
        for task in self._tasks:
            task.cancel()
        await probes.close()
        left: list[int] = []
        if self._host is not None:
            left = await self._host.end_all()
            self._processes.release()
        self._send(m.AllEnded(tuple(left)))
        await self._channel.finish()

    def _send(self, message: m.FromAgent) -> None:
        try:
            self._channel.send(message)
        except (OSError, PacelineError):
            self._over.set()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._send(m.Said(f"the agent failed: {task.exception()!r}"))
            self._over.set()


class ForwardedOutput:
    """Sends the output of one process to the launcher."""

    def __init__(
        self,
        process: RankProcess,
        channel: Channel[m.ToAgent],
        send: Callable[[m.FromAgent], None],
    ) -> None:
        self._rank, self._channel, self._send = process.name.rank, channel, send

    @property
    def is_behind(self) -> bool:
        return self._channel.backlog_bytes > _BACKLOG_BYTES

    def feed(self, is_error: bool, data: bytes) -> None:
        self._send(m.Output(self._rank, is_error, data))

    def finish(self, is_error: bool) -> None:
        self._send(m.Output(self._rank, is_error, b""))


def _report(process: RankProcess, stopped_s: float | None) -> m.ProcessReport:
    return m.ProcessReport(
        process.name.rank,
        stopped_s,
        process.is_exiting,
        process.shows_stacks,
        process.describe_state(),
        processor_s(process.pid) if process.name.is_server else None,
    )


def _words(error: object) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer in {_CONNECT_S:g} s"
    return str(error)
