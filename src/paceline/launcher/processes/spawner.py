"""The spawner: starts processes on this host, forked from the template or as fresh interpreters.

The template (template_main.py) is started at once, and imports modules while the launcher sets up
the job. If there is no template, or it has died, processes start as fresh interpreters, which takes
seconds longer. There is none if it would be of no use, if the user forbids it (--no-template,
PACELINE_TEMPLATE=off), and if the import of a module did something that a fork breaks.

Threads: used in the launcher's loop only; one request to the template is under way at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from paceline.errors import LaunchError
from paceline.launcher.processes import template_main
from paceline.launcher.processes.output import LineForwarder
from paceline.launcher.processes.process import ProcessOutput, RankProcess
from paceline.launcher.processes.run_script import Command
from paceline.launcher.processes.template_main import (
    MAX_REQUEST_BYTES,
    ForkReply,
    ForkRequest,
    read_reply,
)
from paceline.runtime.process_names import ProcessName

_MAX_TEMPLATES = 3  # a template that is killed is replaced, but not for ever
# Not `python -m`: that looks into the working directory first, where the user's modules must not
# replace torch's. PYTHONSAFEPATH would prevent that too, but every script would inherit it.
_START = f"""import sys; sys.path[:1] == [''] and sys.path.pop(0)
from {template_main.__name__} import serve; serve(int(sys.argv[1]))()"""
_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_S = 30.0  # two forks take hundredths of a second; this is for an overloaded machine
_SLOW_S = 10.0  # for the imports; then a line reports what the launcher waits for
# A process shows its environment where that of the template was; its own may be longer by this.
_ROOM = {"PACELINE_TEMPLATE_ROOM": 1024 * "."}


class Spawner:
    """Starts the processes of one job; `log` prints a line."""

    def __init__(self, log: Callable[[str], None], *, dies_with_launcher: bool = True) -> None:
        self._log, self._dies = log, dies_with_launcher
        self._template: Template | None = None
        self._modules: Sequence[str] = ()
        self._environ: Mapping[str, str] = {}
        self._command_bytes = 0
        self._num_templates = 0

    def start_template(
        self, modules: Sequence[str], environ: Mapping[str, str], commands: Sequence[Command]
    ) -> None:
        """Start the template with the environment of a worker without rank."""
        self._modules, self._environ = modules, environ
        self._command_bytes = max(
            sum(len(os.fsencode(word)) + 1 for word in command.argv) for command in commands
        )
        adopt_orphans()
        self._start_template()

    def _start_template(self) -> None:
        try:
            self._template = Template(self._environ, self._modules, self._log, self._command_bytes)
            self._num_templates += 1
        except OSError as error:
            self._log(f"no template: {error.strerror}; every process imports torch itself")

    async def start(
        self, name: ProcessName, command: Command, environ: dict[str, str], output: ProcessOutput
    ) -> RankProcess:
        """Start a process; raises LaunchError."""
        template = self._template
        if template is not None and await template.is_ready():
            process = await template.fork(name, command, environ, output, dies=self._dies)
            if process is not None:
                return process
        if template is not None and template is self._template:
            self._replace_template(template)
        return RankProcess.start(name, command.argv, environ, output, dies_with_launcher=self._dies)

    def _replace_template(self, template: Template) -> None:
        """Replace a template that has died; do without one that could never be forked from."""
        self._log(f"no template: {template.why_not}; processes import torch themselves")
        self._template = None
        template.end()
        if template.has_forked and self._num_templates < _MAX_TEMPLATES:
            self._start_template()

    def reap_orphans(self, known: Collection[int | None]) -> None:
        """Reap ended descendants that no code waits for: helpers of a lost process."""
        if self._template is None or self._template.is_asked:
            return  # an unknown child may be a process whose pid the template is about to send
        path = f"/proc/self/task/{threading.get_native_id()}/children"
        with suppress(OSError), open(path, encoding="ascii") as children:
            for pid in map(int, children.read().split()):
                if pid not in known and pid != self._template.pid:
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """End the template; no further process is expected."""
        if self._template is not None:
            self._template.end()
            self._template = None


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants: of the processes that the template forks."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Template:
    """The launcher's side of a running template. `log` prints what an imported module prints."""

    def __init__(
        self,
        environ: Mapping[str, str],
        modules: Sequence[str],
        log: Callable[[str], None],
        command_bytes: int = 0,
    ) -> None:
        """Start it with a worker's environment, without rank; raises OSError.

        `command_bytes` is the length of the longest command that one of its processes will show.
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
        self._log, self._modules = log, ", ".join(modules)
        self._was_named_slow = False
        self.why_not = ""  # it cannot be forked from
        self._control = ours
        self._turn = asyncio.Lock()
        self._output = LineForwarder(read_end, log)
        self._importing = asyncio.ensure_future(self._wait_for_imports())

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
            wait_fd, go_fd = os.pipe()
        except OSError as error:
            output.close()
            raise LaunchError(
                f"{name} could not be started: {error.strerror}; raise the limit of open files"
                " (ulimit -n)"
            ) from error
        fds = [output.child_stdout, output.child_stderr, wait_fd]
        async with self._turn:
            self.is_asked = True
            try:
                socket.send_fds(self._control, [msgspec.msgpack.encode(request)], fds)
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
            return None
        if not answer.pid:
            output.close()
            raise LaunchError(
                f"{name} could not be started: {answer.error}; check the limits with `paceline"
                " doctor` (processes, memory)"
            )
        output.close_child_ends()
        self.has_forked = True
        return RankProcess(name, answer.pid, output)

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
        self._popen.kill()
        self._popen.wait()
        self._control.close()
        self._output.close()
