"""The launcher's side of the template: start it when the job is up, ask it for newcomers.

It is a convenience: while it is still importing, or when it has died, newcomers start as fresh
interpreters, which takes seconds longer. It costs the memory of one idle process.

Threads: used in the launcher's loop only; one request is under way at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from paceline.errors import LaunchError
from paceline.launcher.elastic import template_program
from paceline.launcher.elastic.template_program import MAX_REQUEST_BYTES, Request, Started
from paceline.launcher.outlet import Outlet
from paceline.launcher.process import RankProcess
from paceline.launcher.seat import Seat
from paceline.launcher.spec import RunSpec

_PR_SET_CHILD_SUBREAPER = 36
_WARM_S = 30.0  # a fresh start would take as long on a machine that is so busy
_ANSWER_S = 5.0  # two forks take hundredths; this is for a machine in distress


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended: of those the template forks."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Template:
    """A running template; `is_warm` when it can be asked."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Start it with a worker's environment, without rank; raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", template_program.__name__, str(theirs.fileno())],
                # Modules of the user's working directory must not stand in for torch's.
                env={**environ, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self.pid = self._popen.pid
        self.is_warm = False
        self.is_asked = False  # a newcomer may be our child before we know its pid
        self._control = ours
        self._turn = asyncio.Lock()
        self._warming = asyncio.ensure_future(self._warm_up())

    async def _warm_up(self) -> None:
        self.is_warm = (await self._hear()) is not None

    async def hurry(self) -> bool:
        """Wait until it is warm, which is sooner than a fresh start; false when that is in vain."""
        if not self._warming.done():
            with suppress(OSError):  # not every user may give a process more priority
                os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0))
            await asyncio.wait({self._warming}, timeout=_WARM_S)
        return self.is_warm

    async def fork(
        self, seat: Seat, spec: RunSpec, environ: dict[str, str], outlet: Outlet, *, dies: bool
    ) -> RankProcess | None:
        """Make a process; None when the template is gone. LaunchError when the machine is full."""
        kind = "server" if seat.is_server else "module" if spec.is_module else "script"
        request = Request(kind, spec.target, spec.arguments, environ, os.getpid(), dies)
        fds = [outlet.far_stdout, outlet.far_stderr]
        async with self._turn:
            self.is_asked = True
            try:
                socket.send_fds(self._control, [msgspec.msgpack.encode(request)], fds)
                answer = await self._hear()
            except OSError:
                answer = None
            finally:
                self.is_asked = False
        if answer is None:
            self.is_warm = False
            return None
        if not answer.pid:
            outlet.close()
            raise LaunchError(
                f"{seat} could not be started: {answer.error}; check the limits with `paceline"
                " doctor` (processes, memory)"
            )
        outlet.close_far()
        return RankProcess(seat, answer.pid, outlet)

    async def _hear(self) -> Started | None:
        """Wait for its next word; None when it has ended, or does not answer when asked."""
        loop = asyncio.get_running_loop()
        limit_s = _ANSWER_S if self.is_asked else None
        try:
            data = await asyncio.wait_for(loop.sock_recv(self._control, MAX_REQUEST_BYTES), limit_s)
        except (OSError, asyncio.TimeoutError):
            return None
        return msgspec.msgpack.decode(data, type=Started) if data else None

    def end(self) -> None:
        """End it; newcomers that it has made are not its own any more."""
        self._warming.cancel()
        self.is_warm = False
        self._popen.kill()
        self._popen.wait()
        self._control.close()
