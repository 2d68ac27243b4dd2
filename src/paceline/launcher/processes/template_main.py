"""The template: a process that has imported torch and Paceline once, and forks others on request.

A fresh interpreter spends seconds on imports; a process that is forked here is at the first line of
its script after some hundredths of a second. The template itself joins nothing, computes nothing
and starts no thread, so that a fork copies a process in a known state.

    launcher -> template   the modules to import (msgpack), then a Request for each process, with
                           three descriptors: for its output, its errors, and where it waits until
                           the launcher knows of it
    template -> launcher   Started: a pid, or why there is none; the first one, with pid 0: ready

The new process is forked twice and its parent ends at once: then it becomes a child of the launcher
(a subreaper), which sees its end and its exit status. What a script can tell apart from a fresh
interpreter is in run_script.py.

The launcher starts it with `python -c` (see template.py); `serve` returns what the process has to
run, so that the script is not called from inside the template's loop.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from paceline.launcher.processes.run_script import Program, become, run, show

_PR_SET_PDEATHSIG = 1
MAX_REQUEST_BYTES = 1 << 20


class Request(msgspec.Struct, frozen=True):
    """One process to be made."""

    program: Program
    environ: dict[str, str]
    launcher: int  # pid of the process whose child it shall be
    dies_with_launcher: bool


class Started(msgspec.Struct, frozen=True):
    pid: int
    error: str = ""


def serve(control_fd: int) -> Callable[[], None]:
    """Import, then fork until the launcher closes its end; return what this process has to run."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    control = socket.socket(fileno=control_fd)
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number in signals:
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher
    show(["paceline: template"])
    for name in msgspec.msgpack.decode(control.recv(MAX_REQUEST_BYTES), type=list[str]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a new process then leaves these objects' pages alone
    control.send(msgspec.msgpack.encode(Started(0, _why_not())))
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
        if not data:
            return lambda: None
        request = msgspec.msgpack.decode(data, type=Request)
        try:
            pid, between = _fork_twice()
        except OSError as error:
            answer = Started(0, error.strerror or str(error))
        else:
            if pid == 0:
                if not os.read(fds[2], 1):
                    os._exit(0)  # the launcher has given up, and does not know of this process
                launcher = request.launcher if request.dies_with_launcher else None
                become(request.program, request.environ, fds, signals, between, launcher)
                return lambda: run(request.program, request.environ)
            answer = Started(pid)
        for fd in fds:
            os.close(fd)
        control.send(msgspec.msgpack.encode(answer))


def _why_not() -> str:
    """Return why this process must not be forked from, if something is there that a fork breaks."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was initialised while modules were imported"
    if threading.active_count() > 1 or _has_lasting_threads():
        return "a module has started a thread while it was imported"
    return ""


def _has_lasting_threads() -> bool:
    """Tell whether threads outlive a fork; those of OpenBLAS end before it, and start again."""
    if _num_threads() == 1:
        return False
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return _num_threads() > 1


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork_twice() -> tuple[int, int]:
    """Return the pid of a grandchild, 0 in the grandchild; and that of its parent, which ends."""
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
    """Fork; a negative number is the error that it met."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)
