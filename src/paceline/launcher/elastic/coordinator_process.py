"""The coordinator of an elastic job: its process, and the launcher's requests to it.

The coordinator is a child process that may die: the launcher starts it again in place, from its
journal. It is then forked from the job's template, if there is one: a fresh interpreter would take
0.2 s of a core. The launcher creates the listening socket and keeps it, so the address outlives the
coordinator: a member that connects meanwhile waits in the socket's queue for the next one. A
coordinator that keeps ending is not started for ever.

The operator (control/client/operator.py) has its own thread and methods that block; here they
become coroutines of the launcher's loop, and news arrive in that loop.

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
from collections.abc import Callable, Mapping, Sequence

from paceline.control.client.operator import Operator
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import Reservation
from paceline.control.messages import LossKind, Wanted
from paceline.control.operator_messages import Notification, Status
from paceline.control.transport.sockets import join_address, listen_tcp
from paceline.errors import LaunchError
from paceline.launcher.host import ProcessHost
from paceline.launcher.job_size import ElasticPlan
from paceline.launcher.processes.forked_child import ForkedChild
from paceline.launcher.processes.output import LineForwarder
from paceline.launcher.processes.process import ExitStatus, die_with
from paceline.launcher.processes.run_script import (
    COORDINATOR,
    COORDINATOR_MODULE,
    KEPT_FD,
    Command,
)
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import EngineConfig
from paceline.runtime.mesh import Mesh

# So many exits within this time are no accident.
_MAX_EXITS, _WITHIN_S = 5, 10.0
_START_S = 30.0  # for the coordinator's first answer, on a machine that is busy starting ranks


def policy_of(
    spec: RunSpec, plan: ElasticPlan, config: EngineConfig, mesh: Mesh | None = None
) -> Policy:
    """Return the options of a job as the coordinator's policy."""
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


class CoordinatorProcess:
    """One coordinator at a time, at one address. `log` prints a line; `host` has the template."""

    def __init__(
        self,
        job_id: str,
        on_notification: Callable[[Notification], None],
        log: Callable[[str], None],
        host: ProcessHost,
    ) -> None:
        self._job_id, self._on_news, self._log = job_id, on_notification, log
        self._host = host
        self.address = ""
        self._listener_fd = -1
        self._child: subprocess.Popen[bytes] | ForkedChild | None = None
        self._restart: asyncio.Task[None] | None = None
        self._failure: LaunchError | None = None  # of the last restart
        self._stderr: LineForwarder | None = None
        self._exits: deque[float] = deque(maxlen=_MAX_EXITS)
        self._arguments: list[str] = []
        self._environ: dict[str, str] = {}
        self._operator: Operator | None = None

    # -- the process -------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self, host: str, port: int, arguments: list[str], environ: Mapping[str, str]) -> str:
        """Start it, and again with the same arguments whenever it ends; return its address."""
        listener = listen_tcp(host, port)
        self.address = join_address(host, listener.getsockname()[1])
        # A copy: the control plane closes its sockets in children, but this one is for a child.
        self._listener_fd = os.dup(listener.fileno())
        listener.close()
        # `python -m` looks into the working directory first: not for this program.
        self._arguments, self._environ = arguments, {**environ, "PYTHONSAFEPATH": "1"}
        self._start()
        return self.address

    def _start(self) -> None:
        """Start it in a fresh interpreter."""
        launcher, fd = os.getpid(), self._listener_fd
        try:
            popen = subprocess.Popen(
                [sys.executable, "-m", COORDINATOR_MODULE, *self._arguments, str(fd)],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(fd,),
                start_new_session=True,
                preexec_fn=lambda: die_with(launcher),
                bufsize=0,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(
                f"the coordinator could not be started: {error}; check the limits with `paceline"
                " doctor` (processes, open files, memory)"
            ) from error
        assert popen.stderr is not None
        self._child = popen
        self._stderr = LineForwarder(os.dup(popen.stderr.fileno()), self._log)
        popen.stderr.close()

    async def _start_again(self, status: ExitStatus) -> None:
        """Fork it from the template; in a fresh interpreter if there is none."""
        try:
            if not await self._start_forked():
                self._start()
        except LaunchError as error:
            self._failure = error
        else:
            self._log(f"the coordinator ended ({status}) and was started again in its place")

    async def _start_forked(self) -> bool:
        command = Command(COORDINATOR, COORDINATOR_MODULE, (*self._arguments, str(KEPT_FD)))
        try:
            read_fd, write_fd = os.pipe()
        except OSError:
            return False  # a fresh interpreter needs one, too, and reports it
        nothing = os.open(os.devnull, os.O_WRONLY)
        child = None
        try:
            outputs = (nothing, write_fd)
            child = await self._host.fork_child(command, self._environ, outputs, self._listener_fd)
        finally:
            os.close(write_fd)
            os.close(nothing)
            if child is None:
                os.close(read_fd)
        if child is None:
            return False
        self._child = child
        self._stderr = LineForwarder(read_fd, self._log)
        return True

    def check(self) -> None:
        """Start it again if it has ended; raises LaunchError if it keeps ending."""
        if self._failure is not None:
            raise self._failure
        if self._child is None or (code := self._child.poll()) is None:
            return
        self._child = None
        status = ExitStatus(code) if code >= 0 else ExitStatus(None, -code)
        now_s = time.monotonic()
        if status.signal != signal.SIGKILL:  # a kill from outside is no fault of its own
            self._exits.append(now_s)
        if len(self._exits) == _MAX_EXITS and now_s - self._exits[0] < _WITHIN_S:
            raise LaunchError(
                f"the coordinator ended {_MAX_EXITS} times within {now_s - self._exits[0]:.1f} s,"
                f" last with {status}; the job is ended"
            )
        self._restart = asyncio.ensure_future(self._start_again(status))

    async def close(self) -> None:
        """Close the connection, and end the coordinator."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait({self._restart})
        if self._operator is not None:
            await asyncio.to_thread(self._operator.close)
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        if self._stderr is not None:
            self._stderr.close()
        if self._listener_fd >= 0:
            os.close(self._listener_fd)
            self._listener_fd = -1

    # -- requests ----------------------------------------------------------------------------

    async def attach(self, secret: bytes) -> Status:
        """Connect, subscribe to its news, and return the status of the job."""
        loop = asyncio.get_running_loop()

        def pass_on(news: Notification) -> None:
            loop.call_soon_threadsafe(self._on_news, news)

        self._operator = await asyncio.to_thread(
            Operator.connect,
            self.address,
            secret,
            self._job_id,
            timeout_s=_START_S,
            on_notification=pass_on,
            is_launcher=True,
        )
        return await asyncio.to_thread(self._operator.status)

    async def reserve(self, role: str, number: int) -> Reservation:
        assert self._operator is not None
        return await asyncio.to_thread(self._operator.reserve, role, number)

    async def status(self) -> Status:
        """Return the job as the coordinator sees it."""
        assert self._operator is not None
        return await asyncio.to_thread(self._operator.status)

    async def wanted(self) -> Sequence[Wanted]:
        """Return the processes that the launcher shall start."""
        return (await self.status()).wanted

    async def scale(self, workers: int) -> None:
        """Have that many workers from now on."""
        assert self._operator is not None
        await asyncio.to_thread(self._operator.scale, workers)

    async def plan_leave(
        self,
        ranks: Sequence[int],
        *,
        waits: bool = False,
        is_withdrawn: bool = False,
        why: str = "",
    ) -> None:
        """Let members leave as planned, or stay after all."""
        assert self._operator is not None
        await asyncio.to_thread(
            self._operator.plan_leave, ranks, waits=waits, is_withdrawn=is_withdrawn, why=why
        )

    def report_end(self, rank: int, text: str, kind: LossKind | None) -> None:
        if self._operator is not None:
            self._operator.report_end(rank, text, kind)

    def answer_hosts(self, request: int, text: str, error: str = "") -> None:
        """Answer a request about hosts."""
        if self._operator is not None:
            self._operator.answer_hosts(request, text, error)

    def report_seen(self, rank: int, stopped_for_s: float | None) -> None:
        """Report whether a process runs (None), or for how long it has been stopped."""
        if self._operator is None:
            return
        if stopped_for_s is None:
            self._operator.report_running(rank)
        else:
            self._operator.report_stopped(rank, stopped_for_s)
