"""The template: a process that imports torch and Paceline once, and forks others on request.

A fresh interpreter spends seconds on imports; a process that the template forks reaches the first
line of its script after some hundredths of a second. The template joins no job, computes nothing
and starts no thread, so that a fork copies a process in a known state.

    launcher -> template   Imports, then a ForkRequest for each process, with its descriptors:
                           stdout, stderr, a pipe on which the process waits until the launcher
                           knows its pid, and perhaps one that it keeps as descriptor 3
    template -> launcher   ForkReply: a pid, or an error; the first reply, with pid 0, means ready

The template forks twice and the process in between exits at once. So the new process becomes a
child of the launcher (a subreaper), which sees its exit status. run_script.py describes how a
script could tell such a process from a fresh interpreter.

The launcher starts the template with `python -c` (see spawner.py). `serve` returns what the process
has to run, so that the script is not called from inside the template's loop. A fork can be another
template (run_script.TEMPLATE): it imports more, and serves its own socket.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from paceline.launcher.processes.imports_ahead import FirstImport, import_ahead, open_files
from paceline.launcher.processes.run_script import KEPT_FD, TEMPLATE, Command, become, run, show
from paceline.launcher.processes.script_end import end_after
from paceline.runtime.launch_context import PACELINE

_PR_SET_PDEATHSIG = 1
MAX_REQUEST_BYTES = 1 << 20
_MANY = 16  # workers of a host; from then on they end by `end_after`


class Imports(msgspec.Struct, frozen=True):
    """What a template imports: modules, and then what a script imports first."""

    modules: list[str]
    first: list[FirstImport] = []


class ForkRequest(msgspec.Struct, frozen=True):
    """A process to fork."""

    command: Command
    environ: dict[str, str]
    launcher: int  # its pid: the parent of the new process
    dies_with_launcher: bool


class ForkReply(msgspec.Struct, frozen=True):
    pid: int
    error: str = ""


def read_reply(data: bytes) -> ForkReply | None:
    """Return a reply; None if there is none: the template has ended, or sent something else."""
    try:
        return msgspec.msgpack.decode(data, type=ForkReply) if data else None
    except (ValueError, RecursionError):  # ValueError: msgspec's and Unicode's
        return None


def serve(control_fd: int) -> Callable[[], None]:
    """Import, then fork until the launcher closes its end; return what a forked process runs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    while True:
        control = socket.socket(fileno=control_fd)
        signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
        for number in signals:
            signal.signal(number, signal.SIG_IGN)  # the launcher handles them
        show(["paceline: template"])
        why_not = _import(msgspec.msgpack.decode(control.recv(MAX_REQUEST_BYTES), type=Imports))
        control.send(msgspec.msgpack.encode(ForkReply(0, why_not)))
        request = _serve_requests(control, signals)
        if request is None:
            return lambda: None
        control.detach()  # `become` has closed it; its number may be that of another file now
        if request.command.kind != TEMPLATE:
            return _program(request.command, request.environ)
        control_fd = KEPT_FD


def _import(imports: Imports) -> str:
    """Import everything; return why this process must not be forked, or ""."""
    for name in imports.modules:
        importlib.import_module(name)
    before = open_files()
    import_ahead(imports.first)
    gc.collect()
    gc.freeze()  # the collector of a new process then leaves these objects' pages alone
    if imports.first and open_files() - before:
        return "a module has opened a file while it was imported"
    return _why_not()


def _serve_requests(
    control: socket.socket, signals: Mapping[signal.Signals, Any]
) -> ForkRequest | None:
    """Fork for each request until the launcher closes its end. Returns in the fork, too: with its
    request."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4)
        if not data:
            return None
        request = msgspec.msgpack.decode(data, type=ForkRequest)
        try:
            pid, between = _fork_twice()
        except OSError as error:
            answer = ForkReply(0, error.strerror or str(error))
        else:
            if pid == 0:
                if not os.read(fds[2], 1):
                    os._exit(0)  # the launcher has given up, and does not know this process
                launcher = request.launcher if request.dies_with_launcher else None
                become(request.command, request.environ, fds, signals, between, launcher)
                return request
            answer = ForkReply(pid)
        for fd in fds:
            os.close(fd)
        control.send(msgspec.msgpack.encode(answer))


def _program(command: Command, environ: dict[str, str]) -> Callable[[], None]:
    """Return what a forked process runs: the command, and its end."""
    shared = frozenset(sys.modules)
    if int(environ.get(PACELINE.local_world_size) or 1) < _MANY:
        return lambda: run(command, environ)
    return lambda: end_after(lambda: run(command, environ), shared)


def _why_not() -> str:
    """Return why this process must not be forked, if it has something that a fork breaks."""
    if "torch" in sys.modules:
        from paceline.comm.devices import is_started

        if is_started():
            return "an accelerator was initialised while modules were imported"
    if threading.active_count() > 1 or _has_lasting_threads():
        return "a module has started a thread while it was imported"
    return ""


def _has_lasting_threads() -> bool:
    """Return whether threads outlive a fork; those of OpenBLAS end before it and restart."""
    if _num_threads() == 1:
        return False
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return _num_threads() > 1


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork_twice() -> tuple[int, int]:
    """Return the pid of a grandchild (0 in the grandchild), and that of its parent, which exits."""
    read_end, write_end = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if between == 0:
        between = os.getpid()
        if (pid := _fork_or_error()) == 0:
            return 0, between  # `become` closes the pipe
        with suppress(OSError):
            os.write(write_end, str(pid).encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(between, 0)
    with open(read_end, "rb", buffering=0) as pipe:
        pid = int(pipe.read(32) or 0)  # not to its end: the new process may still hold it
    if pid <= 0:
        raise OSError(-pid, os.strerror(-pid) if pid else "a fork was killed")
    return pid, between


def _fork_or_error() -> int:
    """Fork; a negative result is the errno of a failure."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)
