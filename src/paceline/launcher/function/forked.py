"""A process that runs a Python function: forked, so that nothing has to be pickled.

The child is a copy of this process, with its modules, its notebook's functions and its data. It
first drops what belongs to the parent (signal handlers, standard input, the terminal's Ctrl-C),
waits for its environment on a socket, runs the function, sends back one message and exits without
the parent's exit handlers.

    parent -> child   the environment (msgpack), then end of stream
    child -> parent   one byte for the kind, the payload, then end of stream

The environment comes late because it has the coordinator's address, and the coordinator is a
thread: a process should fork while it has as few threads as possible.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

import msgspec

from paceline.control.transport.sockets import close_in_children
from paceline.errors import LaunchError, UsageError
from paceline.launcher.function.plain_values import pack
from paceline.launcher.processes.guard import Guard
from paceline.launcher.processes.process import ChildProcess, ExitStatus, die_with
from paceline.runtime.config import adopt_environ
from paceline.runtime.process_names import ProcessName

VALUE, ERROR, NOT_PLAIN = b"v", b"e", b"n"
_READ_BYTES = 1 << 20


class ForkedProcess(ChildProcess):
    """The parent's side of one child. Not thread-safe."""

    def __init__(
        self, name: ProcessName, function: Callable[[], object], guard: Guard, *, threads: int
    ) -> None:
        self._received = bytearray()
        ours, theirs = socket.socketpair()
        self.link = close_in_children(ours)  # no child may keep it open
        launcher = os.getpid()
        try:
            pid = fork_quietly()
        except OSError as error:
            raise LaunchError(
                f"{name} could not be started: {error.strerror}; check the limits with `paceline"
                " doctor` (processes, memory)"
            ) from error
        if pid == 0:
            _run_child(theirs, function, guard, launcher, threads)
        super().__init__(name, pid)
        theirs.close()
        self.link.setblocking(False)

    @property
    def kind(self) -> bytes:
        """VALUE, ERROR or NOT_PLAIN; empty if the child ended without a message."""
        return bytes(self._received[:1])

    @property
    def payload(self) -> bytes:
        return bytes(self._received[1:])

    def send_environ(self, environ: Mapping[str, str]) -> None:
        """Send the child its environment, with which it begins."""
        with suppress(OSError):  # it is dead already, which its status shows
            self.link.setblocking(True)
            self.link.sendall(msgspec.msgpack.encode(dict(environ)))
            self.link.shutdown(socket.SHUT_WR)
            self.link.setblocking(False)

    def receive(self) -> bool:
        """Read what has arrived; return false at the end of the stream."""
        try:
            while data := self.link.recv(_READ_BYTES):
                self._received += data
        except BlockingIOError:
            return True
        except OSError:
            pass  # a child that is killed with unread data resets the connection
        return False

    def check_ended(self) -> bool:
        """Return true once the child has ended; its traceback counts as its stderr."""
        if not super().check_ended():
            return False
        self.receive()
        text = "" if self.kind == VALUE else self.payload.decode(errors="replace")
        if not text and self.status is not None and not self.status.is_success:
            text = "(no traceback; what it printed is in the output of this process)"
        self.stderr_tail.extend(text.splitlines())
        return True

    def _peek(self) -> ExitStatus | None:
        try:
            return super()._peek()
        except ChildProcessError:  # other code in this process reaped it, with its exit code
            return ExitStatus(0 if self.kind == VALUE else 1)

    def release(self) -> None:
        """Reap the child after it was killed, and close the link."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.check_ended()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.link.close()


def fork_quietly() -> int:
    """Fork without unwritten output, and without the warning about threads."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or the child would write it again
    with warnings.catch_warnings():
        # Newer Pythons warn about threads, which notebooks have. None of them is Paceline's.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# -- in the child -------------------------------------------------------------------------------


def _run_child(
    link: socket.socket,
    function: Callable[[], object],
    guard: Guard,
    launcher: int,
    threads: int,
) -> NoReturn:
    """Run the child from fork to exit; never returns into the parent's code."""
    code = 1
    try:
        _drop_parent_state(launcher)
        guard.close_in_child()
        close_in_children(link)
        if environ := _receive_environ(link):
            adopt_environ(environ)
            code, message = _run(function, threads)
            link.sendall(message)
            link.shutdown(socket.SHUT_WR)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _drop_parent_state(launcher: int) -> None:
    os.setsid()  # Ctrl-C goes to the parent, which then ends its children
    die_with(launcher)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _receive_environ(link: socket.socket) -> dict[str, str]:
    """Wait for the environment; empty if the parent gave up."""
    data = bytearray()
    while piece := link.recv(_READ_BYTES):
        data += piece
    return msgspec.msgpack.decode(data, type=dict[str, str]) if data else {}


def _run(function: Callable[[], object], threads: int) -> tuple[int, bytes]:
    """Call the function, then leave the job; return the exit code and the message."""
    try:
        if "torch" in sys.modules:  # it read OMP_NUM_THREADS at its import, in the parent
            sys.modules["torch"].set_num_threads(threads)
        value = function()
        _leave()
    except BaseException as error:
        with suppress(Exception):
            _leave()
        return _failure(error)
    try:
        return 0, VALUE + pack(value)
    except UsageError as error:
        return 1, NOT_PLAIN + str(error).encode(errors="replace")


def _failure(error: BaseException) -> tuple[int, bytes]:
    """Return the exit code and the output of a script that ends with this error."""
    if isinstance(error, SystemExit):
        if error.code is None or error.code == 0:
            return 0, VALUE + pack(None)
        if isinstance(error.code, int):
            return error.code & 0xFF, ERROR
        return 1, ERROR + str(error.code).encode(errors="replace")
    within = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.format_exception(type(error), error, within)
    return 1, ERROR + "".join(lines).encode(errors="replace")


def _leave() -> None:
    """Leave the job, if the function joined one: exit handlers do not run here."""
    job = sys.modules.get("paceline.runtime.job")
    if job is not None:
        job.shutdown()
