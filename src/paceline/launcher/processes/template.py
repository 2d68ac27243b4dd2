"""The launcher's side of the template: start it, and ask it for processes.

It is a convenience: when it cannot be had, or has died, processes start as fresh interpreters,
which takes seconds longer.

Threads: used in the launcher's loop only; one request is under way at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from paceline.errors import LaunchError
from paceline.launcher.processes import template_main as template_program
from paceline.launcher.processes.pipes import Outlet
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.processes.run_script import Program
from paceline.launcher.processes.template_main import MAX_REQUEST_BYTES, Request, Started
from paceline.observe.display.lines import LineSplitter
from paceline.runtime.process_names import Seat

# Not `python -m`: that looks into the working directory first, where modules of the user's must not
# stand in for torch's. PYTHONSAFEPATH would prevent that too, and every script would see it.
_START = f"""import sys; sys.path[:1] == [''] and sys.path.pop(0)
from {template_program.__name__} import serve; serve(int(sys.argv[1]))()"""
_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_S = 30.0  # two forks take hundredths; this is for a machine in distress
_SLOW_S = 10.0  # to import; then a line says what is waited for
_READ_BYTES = 1 << 16
# A process shows its environment where that of the template was; its own may be longer by this.
_ROOM = {"PACELINE_TEMPLATE_ROOM": 1024 * "."}


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended: of those the template forks."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Template:
    """A running template. `say` shows a line that a module prints while it is imported."""

    def __init__(
        self,
        environ: Mapping[str, str],
        modules: Sequence[str],
        say: Callable[[str], None],
        command_bytes: int = 0,
    ) -> None:
        """Start it with a worker's environment, without rank; raises OSError.

        `command_bytes` is the length of the longest command that a process of it will show.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, write_end = os.pipe()
        fd = theirs.fileno()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _START, str(fd), command_bytes * "."],
                env={**environ, **_ROOM},
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(fd,),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
        ours.send(msgspec.msgpack.encode(list(modules)))
        ours.setblocking(False)
        self.pid = self._popen.pid
        self.is_asked = False  # a new process may be our child before we know its pid
        self.has_forked = False
        self._say, self._modules = say, ", ".join(modules)
        self._is_quiet = True  # nothing was said about how long it takes
        self.why_not = ""  # it cannot be forked from
        self._control = ours
        self._turn = asyncio.Lock()
        self._show_output(read_end, say)
        self._warming = asyncio.ensure_future(self._warm_up())

    def _show_output(self, fd: int, say: Callable[[str], None]) -> None:
        loop, splitter = asyncio.get_running_loop(), LineSplitter()
        self._output = open(fd, "rb", buffering=0)  # noqa: SIM115 - closed at its end
        os.set_blocking(fd, False)

        def read() -> None:
            with suppress(BlockingIOError):
                while data := os.read(fd, _READ_BYTES):
                    for line in splitter.feed(data):
                        say(line)
                for line in splitter.finish():
                    say(line)
                loop.remove_reader(fd)
                self._output.close()

        loop.add_reader(fd, read)
        self._read = read

    async def _warm_up(self) -> bool:
        word = await self._hear(None)
        if word is None:
            self.why_not = "it ended while it imported modules"
        else:
            self.why_not = word.error
        return not self.why_not

    async def is_ready(self) -> bool:
        """Wait until it has imported everything; false when it cannot be forked from."""
        done, _ = await asyncio.wait({self._warming}, timeout=_SLOW_S)
        if not done and self._is_quiet:
            self._is_quiet = False
            self._say(
                f"processes start when the template (pid {self.pid}) has imported {self._modules},"
                f" which takes more than {_SLOW_S:g} s: the machine or its disk is busy"
            )
        return await asyncio.shield(self._warming) and not self.why_not

    async def fork(
        self, seat: Seat, program: Program, environ: dict[str, str], outlet: Outlet, *, dies: bool
    ) -> RankProcess | None:
        """Make a process; None when the template is gone. LaunchError when the machine is full."""
        request = Request(program, environ, os.getpid(), dies)
        wait_fd, go_fd = os.pipe()
        fds = [outlet.far_stdout, outlet.far_stderr, wait_fd]
        async with self._turn:
            self.is_asked = True
            try:
                socket.send_fds(self._control, [msgspec.msgpack.encode(request)], fds)
                answer = await self._hear(_ANSWER_S)
                if answer is not None and answer.pid:
                    os.write(go_fd, b"g")  # we know of it; without this it ends at once
            except OSError as error:
                answer, self.why_not = None, f"{error.strerror}"
            except asyncio.CancelledError:
                self.why_not = "nobody has heard its last answer"
                raise
            finally:
                self.is_asked = False
                os.close(wait_fd)
                os.close(go_fd)
        if answer is None:
            self.why_not = self.why_not or "it has ended"
            return None
        if not answer.pid:
            outlet.close()
            raise LaunchError(
                f"{seat} could not be started: {answer.error}; check the limits with `paceline"
                " doctor` (processes, memory)"
            )
        outlet.close_far()
        self.has_forked = True
        return RankProcess(seat, answer.pid, outlet)

    async def _hear(self, limit_s: float | None) -> Started | None:
        """Wait for its next word; None when it has ended, or does not answer when asked."""
        loop = asyncio.get_running_loop()
        try:
            data = await asyncio.wait_for(loop.sock_recv(self._control, MAX_REQUEST_BYTES), limit_s)
        except (OSError, asyncio.TimeoutError):
            return None
        return msgspec.msgpack.decode(data, type=Started) if data else None

    def end(self) -> None:
        """End it; the processes that it has made are not its own any more."""
        self._warming.cancel()
        self._popen.kill()
        self._popen.wait()
        self._control.close()
        if not self._output.closed:
            self._read()
        if not self._output.closed:  # something that it started holds the far end
            asyncio.get_running_loop().remove_reader(self._output.fileno())
            self._output.close()
