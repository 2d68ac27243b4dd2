"""The job's coordinator as the launcher has it: its process, and what is said to it.

The coordinator is a child process that may die: it is started again in place, from its journal. The
launcher makes the listening socket and keeps it, so the address outlives the coordinator: who
connects while nobody serves waits in the socket's queue for the next one. A coordinator that cannot
even start is not started for ever.

The operator (control/client/operator.py) has a thread of its own and methods that block; here they
become coroutines of the launcher's loop, and news arrive in it.

Threads: used in the launcher's loop only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from paceline.control.client.operator import News, Operator, Status
from paceline.control.membership.decisions import Place
from paceline.control.membership.policy import Policy
from paceline.control.transport.messages import LossKind
from paceline.control.transport.sockets import join_address, listen_tcp
from paceline.errors import LaunchError
from paceline.launcher.elastic.bounds import ElasticPlan
from paceline.launcher.processes.process import ExitStatus, die_with
from paceline.launcher.spec import RunSpec
from paceline.observe.display.lines import LineSplitter
from paceline.runtime.config import EngineConfig
from paceline.runtime.mesh import Mesh

PROGRAM = "paceline.runtime.coordinator_main"
_READ_BYTES = 1 << 16
# So many ends within this time are no accident.
_MOST_ENDS, _WITHIN_S = 5, 10.0
_START_S = 30.0  # for the coordinator's first answer, on a machine that is busy starting ranks


class Coordination:
    """One coordinator at a time, at one address. `say` shows a line."""

    def __init__(self, host: str, port: int, say: Callable[[str], None]) -> None:
        listener = listen_tcp(host, port)
        self.address = join_address(host, listener.getsockname()[1])
        # A copy: sockets made by the control plane are closed in children, which this is for.
        self._fd = os.dup(listener.fileno())
        listener.close()
        self._say = say
        self._popen: subprocess.Popen[bytes] | None = None
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)
        self._arguments: list[str] = []
        self._environ: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self, arguments: list[str], environ: Mapping[str, str]) -> None:
        """Start it with these arguments, and again with the same whenever it ends."""
        self._arguments, self._environ = arguments, dict(environ)
        self._start()

    def _start(self) -> None:
        launcher = os.getpid()
        # `python -m` would look into the working directory first: not for this program.
        environ = {**self._environ, "PYTHONSAFEPATH": "1"}
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *self._arguments, str(self._fd)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(self._fd,),
                start_new_session=True,
                preexec_fn=lambda: die_with(launcher),
                bufsize=0,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(
                f"the coordinator could not be started: {error}; check the limits with `paceline"
                " doctor` (processes, open files, memory)"
            ) from error
        assert self._popen.stderr is not None
        os.set_blocking(self._popen.stderr.fileno(), False)
        self._read_from(self._popen)

    def _read_from(self, popen: subprocess.Popen[bytes]) -> None:
        loop, splitter = asyncio.get_running_loop(), LineSplitter()
        assert popen.stderr is not None
        fd, pipe = popen.stderr.fileno(), popen.stderr

        def on_readable() -> None:
            with suppress(BlockingIOError):
                data = os.read(fd, _READ_BYTES)
                for line in splitter.feed(data) if data else splitter.finish():
                    self._say(line)
                if not data:
                    loop.remove_reader(fd)
                    pipe.close()

        loop.add_reader(fd, on_readable)

    def look(self) -> None:
        """Start it again if it has ended; LaunchError when it keeps ending."""
        if self._popen is None or self._popen.poll() is None:
            return
        code = self._popen.returncode
        how = ExitStatus(code) if code >= 0 else ExitStatus(None, -code)
        now_s = time.monotonic()
        if how.signal != signal.SIGKILL:  # else somebody killed it, which says nothing about it
            self._ends.append(now_s)
        if len(self._ends) == _MOST_ENDS and now_s - self._ends[0] < _WITHIN_S:
            self._popen = None
            raise LaunchError(
                f"the coordinator ended {_MOST_ENDS} times within {now_s - self._ends[0]:.1f} s,"
                f" last with {how}; the job is ended"
            )
        self._start()
        self._say(f"the coordinator ended ({how}) and was started again in its place")

    def end(self) -> None:
        """End it for good; its address is free again."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            if self._popen.stderr is not None and not self._popen.stderr.closed:
                asyncio.get_running_loop().remove_reader(self._popen.stderr.fileno())
                self._popen.stderr.close()
            self._popen = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def policy_of(
    spec: RunSpec, plan: ElasticPlan, config: EngineConfig, mesh: Mesh | None = None
) -> Policy:
    """Return what was asked for in the coordinator's words."""
    return Policy(
        num_workers=spec.num_workers,
        num_servers=spec.num_servers,
        is_elastic=True,
        min_workers=plan.min_workers,
        max_workers=plan.max_workers,
        max_servers=plan.max_servers,
        on_loss=plan.on_loss,
        replicas=spec.servers.replicas,
        num_partitions=plan.num_partitions(spec.servers),
        mesh=str(mesh or ""),
        lease_s=config.lease_s,
    )


class Control:
    """The coordinator, from its start to its end."""

    def __init__(
        self,
        coordination: Coordination,
        secret: bytes,
        job_id: str,
        on_news: Callable[[News], None],
    ) -> None:
        self._coordination = coordination
        self._secret, self._job_id, self._on_news = secret, job_id, on_news
        self._operator: Operator | None = None

    @property
    def pid(self) -> int | None:
        return self._coordination.pid

    async def attach(self) -> Status:
        """Begin to listen; return how the job is. News come from now on."""
        loop = asyncio.get_running_loop()

        def pass_on(news: News) -> None:
            loop.call_soon_threadsafe(self._on_news, news)

        self._operator = await asyncio.to_thread(
            Operator.connect,
            self._coordination.address,
            self._secret,
            self._job_id,
            timeout_s=_START_S,
            on_news=pass_on,
            is_launcher=True,
        )
        return await self.status()

    def look(self) -> None:
        """Start the coordinator again if it has ended; LaunchError when it keeps ending."""
        self._coordination.look()

    async def status(self) -> Status:
        assert self._operator is not None
        return await asyncio.to_thread(self._operator.status)

    async def reserve(self, role: str, number: int) -> Place:
        assert self._operator is not None
        return await asyncio.to_thread(self._operator.reserve, role, number)

    def report_end(self, rank: int, text: str, kind: LossKind | None) -> None:
        if self._operator is not None:
            self._operator.report_end(rank, text, kind)

    def report_seen(self, rank: int, stopped_for_s: float | None) -> None:
        """Tell whether a process runs (None), or for how long it has been stopped."""
        if self._operator is None:
            return
        if stopped_for_s is None:
            self._operator.report_running(rank)
        else:
            self._operator.report_stopped(rank, stopped_for_s)

    async def close(self) -> None:
        """End the connection and the coordinator."""
        if self._operator is not None:
            await asyncio.to_thread(self._operator.close)
        self._coordination.end()
