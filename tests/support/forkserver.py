"""The fork server: a process with everything imported, from which ranks are forked.

It reads requests from one socket: a pickled request with two descriptors, the rank's connection to
the test and the file for its output. It answers with the pid, and later with the exit status. There
is no thread but the main one, so a fork copies a process in a known state. Orphans of ranks become
its children (it is a subreaper) and are reaped too, so that a test can see whether any are left.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing.util
import os
import pickle
import pkgutil
import selectors
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import body, changed_code

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOADED = (
    "torch",
    "torch._dynamo",  # every optimizer imports it when it is made, which takes a second
    "numpy",
    "rich.table",
    "pytest",
    "_pytest.assertion.rewrite",
)
_UNUSED = (
    *("paceline.launcher", "paceline.cli", "paceline.observe.report", "paceline.__main__"),
    *("paceline.keras.callbacks", "paceline.lightning"),  # import a framework, if it is installed
    *("paceline.horovod.keras", "paceline.horovod.tensorflow"),
)
_libc = ctypes.CDLL(None)


def main(control_fd: int) -> int:
    """Serve until the test session closes its end; in a forked rank: its exit status."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session
    for name in (*_LOADED, *_own_modules()):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    # Only what matters to a rank: torch's own exit handlers take longer than most tests.
    atexit._clear()
    for function in (
        sys.modules["paceline.runtime.job"].shutdown,
        multiprocessing.util._exit_function,
    ):
        atexit.register(function)
    gc.collect()
    gc.freeze()  # forked ranks then share these objects' pages
    control = socket.socket(fileno=control_fd)
    control.send(pickle.dumps(("ready", os.getpid())))
    for request, connection_fd, output_fd in _requests(control):
        function = _prepare(request)
        assert len(os.listdir("/proc/self/task")) == 1, "the fork server must not have threads"
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_rank(connection_fd, output_fd, request["environ"])
            return _run(function, Connection(connection_fd))
        os.close(connection_fd)
        os.close(output_fd)
        control.send(pickle.dumps(("started", pid)))
    return 0


def _own_modules() -> list[str]:
    """All that a rank may use of paceline: importing it would take most of a rank's time."""
    import paceline

    found = pkgutil.walk_packages(paceline.__path__, "paceline.")
    return [module.name for module in found if not module.name.startswith(_UNUSED)]


def _requests(control: socket.socket) -> Any:
    """Yield requests, and report exits in between."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _report_exits(control)
            if control.fileno() in ready:
                data, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
                if not data:
                    return
                yield pickle.loads(data), *fds


def _report_exits(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            control.send(pickle.dumps(("ended", found[0], os.waitstatus_to_exitcode(found[1]))))


def _prepare(request: dict[str, Any]) -> Any:
    try:
        return body.unpack(request["function"]), request["arguments"]
    except Exception as error:  # a test module that does not import is the rank's failure
        return error, ()


def _become_rank(connection_fd: int, output_fd: int, environ: dict[str, str]) -> None:
    """Forget the server: own session, own output, own environment, ordinary signals."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.set_inheritable(connection_fd, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != connection_fd:
            with contextlib.suppress(OSError):
                os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a rank that hangs shows where


def _run(prepared: Any, connection: Connection) -> int:
    function, arguments = prepared
    body.connect_to_test(connection)
    status, rank_pid = 0, os.getpid()
    try:
        if isinstance(function, Exception):
            raise function
        if changes := os.environ.get("CHANGED_CODE"):  # tests/device/mutants.py
            changed_code.apply(Path(changes))
        outcome = ("value", function(*arguments))
    except SystemExit as stop:
        outcome, status = ("value", None), stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        outcome, status = ("error", error), 1
    try:
        packed = pickle.dumps(outcome)
    except Exception:
        packed = pickle.dumps(("error", RuntimeError(f"cannot be pickled: {outcome[1]!r}")))
    if os.getpid() == rank_pid:  # else the body forked, and this is the child at its end
        with contextlib.suppress(OSError):  # the test may have stopped listening
            connection.send_bytes(packed)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    # Without tearing the interpreter down: that takes longer than all the rest of a rank's life.
    os._exit(main(int(sys.argv[1])))
