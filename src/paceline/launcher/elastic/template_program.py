"""The template: a process that has imported torch and Paceline, and forks newcomers on request.

A newcomer that starts as a fresh interpreter spends seconds on imports; one that is forked here is
at the first line of its script after some hundredths of a second. The template itself joins
nothing, computes nothing and starts no thread, so that a fork copies a process in a known state.

    launcher -> template   a Request (msgpack) with two descriptors, for output and errors
    template -> launcher   Started: a pid, or why there is none; the first one, with pid 0: ready

The newcomer is forked twice and its parent ends at once: then it becomes a child of the launcher (a
subreaper), which sees its end and its exit status as it does those of all others.

Run by the launcher as `python -m paceline.launcher.elastic.template_program FD`; see template.py.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from paceline.config import adopt_environ
from paceline.launcher.process import die_with

_PR_SET_PDEATHSIG = 1
_LOADED = (
    "numpy",
    "torch",
    "torch._dynamo",  # every optimizer imports it when it is made, which takes a second
    "paceline.job",
    "paceline.serve",
    "paceline.data.shard",
    "paceline.model_parallel.distribute",
)
MAX_REQUEST_BYTES = 1 << 20


class Request(msgspec.Struct, frozen=True):
    """One process to be made. `kind` is "script", "module" or "server"."""

    kind: str
    target: str
    arguments: tuple[str, ...]
    environ: dict[str, str]
    launcher: int  # pid of the process whose child it shall be
    dies_with_launcher: bool


class Started(msgspec.Struct, frozen=True):
    pid: int
    error: str = ""


def main(control_fd: int) -> Callable[[], None] | None:
    """Serve until the launcher closes its end; in a newcomer: return what it has to run."""
    control = socket.socket(fileno=control_fd)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher's; newcomers get the usual ones back
    was_nice = os.getpriority(os.PRIO_PROCESS, 0)
    if _may_return_to(was_nice):
        os.nice(5)  # the job's own processes are in more of a hurry
    for name in _LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # newcomers then share these objects' pages
    os.setpriority(os.PRIO_PROCESS, 0, was_nice)
    control.send(msgspec.msgpack.encode(Started(0)))
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
        if not data:
            return None
        request = msgspec.msgpack.decode(data, type=Request)
        try:
            pid = _fork_twice()
        except OSError as error:
            answer = Started(0, error.strerror or str(error))
        else:
            if pid == 0:
                _become(request, fds[0], fds[1])
                return lambda: _run(request)
            answer = Started(pid)
        for fd in fds:
            os.close(fd)
        control.send(msgspec.msgpack.encode(answer))


def _may_return_to(niceness: int) -> bool:
    """Say whether we could take back a lower priority, which not every user may."""
    import resource

    # The limit is written as 20 - niceness, because a limit cannot be negative.
    return os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - niceness


def _fork_twice() -> int:
    """Return the pid of a grandchild whose parent has ended; 0 in the grandchild."""
    read_end, write_end = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if between == 0:
        if (pid := _fork_or_error()) == 0:
            return 0  # _become closes the pipe
        os.write(write_end, str(pid).encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(between, 0)
    with open(read_end, "rb", buffering=0) as pipe:
        pid = int(pipe.read(32) or 0)  # not to its end: the newcomer may still hold it
    if pid <= 0:
        raise OSError(-pid, os.strerror(-pid) if pid else "a fork was killed")
    return pid


def _fork_or_error() -> int:
    """Fork; a negative number is the error that it met."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)


# -- in the newcomer ----------------------------------------------------------------------------


def _become(request: Request, stdout_fd: int, stderr_fd: int) -> None:
    """Forget the template: own session, own output, own environment, ordinary signals."""
    os.setsid()
    while os.getppid() not in (request.launcher, 1):  # the process between is about to end
        time.sleep(0.0005)
    if request.dies_with_launcher:
        die_with(request.launcher)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    adopt_environ(request.environ)
    if request.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    torch.set_num_threads(int(request.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    numpy.random.seed()  # else all newcomers would draw the same numbers


def _run(request: Request) -> None:
    """Run the script as a fresh interpreter would, with its arguments, path and tracebacks."""
    sys.argv = [request.target, *request.arguments]
    if request.kind == "server":
        sys.exit(importlib.import_module("paceline.serve").main())
    is_module = request.kind == "module"
    if not request.environ.get("PYTHONSAFEPATH"):
        script_dir = os.path.dirname(os.path.realpath(request.target))
        sys.path.insert(0, os.getcwd() if is_module else script_dir)
    try:
        if is_module:
            runpy.run_module(request.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(request.target, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_of_the_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):  # as the interpreter does, for the exit status
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """Leave out the frames above the script's own; all of them when it was not even compiled."""
    above = {__file__, runpy.__file__, "<frozen runpy>", runpy.run_path.__code__.co_filename}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in above:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    to_run = main(int(sys.argv[1]))
    if to_run is not None:
        to_run()
