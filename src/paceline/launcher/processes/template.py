"""The launcher's side of a template (template_main.py): a process that forks others on request.

A template is a fresh interpreter (`start`) or a fork of another template (`fork_template`), which
has imported more.

Threads: used in the launcher's loop only; one request to a template is under way at a time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from paceline.errors import LaunchError
from paceline.launcher.processes import template_main
from paceline.launcher.processes.forked_child import ForkedChild
from paceline.launcher.processes.imports_ahead import FirstImport
from paceline.launcher.processes.output import LineForwarder
from paceline.launcher.processes.process import ProcessOutput, RankProcess
from paceline.launcher.processes.run_script import TEMPLATE, Command
from paceline.launcher.processes.template_main import (
    MAX_REQUEST_BYTES,
    ForkReply,
    ForkRequest,
    Imports,
    read_reply,
)
from paceline.runtime.process_names import ProcessName

# Not `python -m`: that looks into the working directory first, where the user's modules must not
# replace torch's. PYTHONSAFEPATH would prevent that too, but every script would inherit it.
_START = f"""import sys; sys.path[:1] == [''] and sys.path.pop(0)
from {template_main.__name__} import serve; serve(int(sys.argv[1]))()"""
_ANSWER_S = 30.0  # two forks take hundredths of a second; this is for an overloaded machine
_SLOW_S = 10.0  # for the imports; then a line reports what the launcher waits for
# A process shows its environment where that of the template was; its own may be longer by this.
_ROOM = {"PACELINE_TEMPLATE_ROOM": 1024 * "."}

Child = subprocess.Popen[bytes] | ForkedChild


class Template:
    """A running template. `log` prints what an imported module prints."""

    def __init__(
        self,
        child: Child,
        control: socket.socket,
        output_fd: int,
        imports: Imports,
        environ: Mapping[str, str],
        log: Callable[[str], None],
    ) -> None:
        with suppress(BrokenPipeError):  # it has ended: no reply comes
            control.send(msgspec.msgpack.encode(imports))
        control.setblocking(False)
        self._child, self._control, self._environ = child, control, environ
        self.pid = child.pid
        self.is_asked = False  # a new process may be our child before we know its pid
        self.has_forked = False
        self._log = log
        self._modules = ", ".join([*imports.modules, *(one.module for one in imports.first)])
        self._was_named_slow = False
        self.why_not = ""  # it cannot be forked from
        self._turn = asyncio.Lock()
        self._output = LineForwarder(output_fd, log)
        self._importing = asyncio.ensure_future(self._wait_for_imports())

    @classmethod
    def start(
        cls,
        environ: Mapping[str, str],
        modules: Sequence[str],
        log: Callable[[str], None],
        command_bytes: int = 0,
    ) -> Template:
        """Start one with a worker's environment, without rank; raises OSError.

        `command_bytes` is the length of the longest command that one of its processes will show.
        """
        ends = _Ends()
        fd = ends.theirs.fileno()
        try:
            popen = subprocess.Popen(
                [sys.executable, "-c", _START, str(fd), command_bytes * "."],
                env={**environ, **_ROOM},
                stdin=subprocess.DEVNULL,
                stdout=ends.write_fd,
                stderr=ends.write_fd,
                pass_fds=(fd,),
                start_new_session=True,
            )
        except BaseException:
            ends.close_near()
            raise
        finally:
            ends.close_far()
        return cls(popen, ends.ours, ends.read_fd, Imports(list(modules)), environ, log)

    async def _wait_for_imports(self) -> bool:
        reply = await self._receive(None)
        self.why_not = "it ended while it imported modules" if reply is None else reply.error
        return not self.why_not

    async def is_ready(self) -> bool:
        """Wait until it has imported everything; false if it cannot be forked from."""
        done, _ = await asyncio.wait({self._importing}, timeout=_SLOW_S)
        if not done and not self._was_named_slow:
            self._was_named_slow = True
            self._log(
                f"processes start when the template (pid {self.pid}) has imported {self._modules},"
                f" which takes more than {_SLOW_S:g} s: the machine or its disk is busy"
            )
        return await asyncio.shield(self._importing) and not self.why_not

    @property
    def is_importing(self) -> bool:
        """Whether it has not imported everything yet."""
        return not self._importing.done()

    # -- forks --------------------------------------------------------------------------------

    async def fork(
        self,
        name: ProcessName,
        command: Command,
        environ: dict[str, str],
        output: ProcessOutput,
        *,
        dies: bool,
    ) -> RankProcess | None:
        """Fork a process; None if the template is gone. LaunchError if the machine is full."""
        request = ForkRequest(command, environ, os.getpid(), dies)
        try:
            answer = await self._ask(request, output.child_stdout, output.child_stderr)
            pid = _pid_of(answer, f"{name}")
        except LaunchError:
            output.close()
            raise
        if not pid:
            return None
        output.close_child_ends()
        return RankProcess(name, pid, output)

    async def fork_child(
        self, command: Command, environ: Mapping[str, str], outputs: tuple[int, int], kept_fd: int
    ) -> ForkedChild | None:
        """Fork a process that is no rank and ends with the launcher; it has `kept_fd` as its
        descriptor 3. None if the template is gone. LaunchError if the machine is full."""
        request = ForkRequest(command, dict(environ), os.getpid(), dies_with_launcher=True)
        answer = await self._ask(request, *outputs, kept_fd)
        pid = _pid_of(answer, f"the {command.kind}")
        return ForkedChild(pid) if pid else None

    async def fork_template(self, first: Sequence[FirstImport]) -> Template | None:
        """Fork another template, which also imports what a script imports first. None if this one
        is gone. LaunchError if the machine is full."""
        try:
            ends = _Ends()
        except OSError as error:
            raise LaunchError(f"no second template: {error.strerror}") from error
        child: ForkedChild | None = None
        command, outputs = Command(TEMPLATE, "", ()), (ends.write_fd, ends.write_fd)
        try:
            child = await self.fork_child(command, self._environ, outputs, ends.theirs.fileno())
        finally:
            ends.close_far()
            if child is None:
                ends.close_near()
        if child is None:
            return None
        imports = Imports([], list(first))
        return Template(child, ends.ours, ends.read_fd, imports, self._environ, self._log)

    async def _ask(self, request: ForkRequest, *fds: int) -> ForkReply | None:
        """Send a request with its descriptors; let the new process run once its pid is known."""
        try:
            wait_fd, go_fd = os.pipe()
        except OSError as error:
            return ForkReply(0, f"{error.strerror}; raise the limit of open files (ulimit -n)")
        answer: ForkReply | None = None
        async with self._turn:
            self.is_asked = True
            try:
                data = msgspec.msgpack.encode(request)
                socket.send_fds(self._control, [data], [*fds[:2], wait_fd, *fds[2:]])
                answer = await self._receive(_ANSWER_S)
                if answer is not None and answer.pid:
                    os.write(go_fd, b"g")  # its pid is known; without this it exits at once
            except (BrokenPipeError, ConnectionResetError):
                answer = None  # it has ended
            except OSError as error:
                answer, self.why_not = None, f"{error.strerror}"
            except asyncio.CancelledError:
                self.why_not = "its last answer was not read"
                raise
            finally:
                self.is_asked = False
                os.close(wait_fd)
                os.close(go_fd)
        if answer is None:
            self.why_not = self.why_not or "it has ended"
        else:
            self.has_forked = self.has_forked or bool(answer.pid)
        return answer

    async def _receive(self, limit_s: float | None) -> ForkReply | None:
        """Wait for its next reply; None if it has ended, or does not answer in time."""
        loop = asyncio.get_running_loop()
        try:
            data = await asyncio.wait_for(loop.sock_recv(self._control, MAX_REQUEST_BYTES), limit_s)
        except (OSError, asyncio.TimeoutError):
            return None
        return read_reply(data)

    def end(self) -> None:
        """Kill it; the processes that it forked are not its children any more."""
        self._importing.cancel()
        self._child.kill()
        self._child.wait()
        self._control.close()
        self._output.close()


class _Ends:
    """The descriptors between the launcher and a template that it starts; raises OSError."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.read_fd, self.write_fd = os.pipe()
        except OSError:
            self.ours.close()
            self.theirs.close()
            raise

    def close_near(self) -> None:
        """Close the launcher's ends."""
        self.ours.close()
        os.close(self.read_fd)

    def close_far(self) -> None:
        """Close the ends that the template has."""
        self.theirs.close()
        os.close(self.write_fd)


def _pid_of(answer: ForkReply | None, who: str) -> int:
    """Return the pid of a fork; 0 if the template is gone. LaunchError if the machine is full."""
    if answer is None:
        return 0
    if not answer.pid:
        raise LaunchError(
            f"{who} could not be started: {answer.error}; check the limits with `paceline doctor`"
            " (processes, memory)"
        )
    return answer.pid
