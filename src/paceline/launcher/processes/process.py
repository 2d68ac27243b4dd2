"""One process of a job: how it starts, where its output goes, and how it ended.

Each process leads its own session. So one signal reaches everything that it started, and Ctrl-C in
the terminal reaches only the launcher.

Death of the launcher. PR_SET_PDEATHSIG must be set in the child between fork and exec; that is done
in `preexec_fn`. The alternative, a trampoline command that sets it and then execs the script, costs
an interpreter start (10 ms bare, 60 ms with site-packages) per rank and opens a window in which the
rank is not protected. The argument against preexec_fn is that Python code runs in a forked child
while other threads hold locks. It does not apply here: the launcher starts ranks from its main
thread (the signal is bound to the *thread* that forked), the first ones before the display thread
exists, and the function calls only what was looked up beforehand.

A process that ended stays a zombie until the launcher releases it, at the end of the job or when it
is replaced (waitid with WNOWAIT). Until then the kernel cannot reuse its pid, which is also the
number of its session and process group.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError
from paceline.observe.telemetry.wait_reports import STACKS_SIGNAL
from paceline.runtime.preemption import PREEMPTED
from paceline.runtime.process_names import ProcessName

_PR_SET_PDEATHSIG = 1
_PF_EXITING = 0x4
# Lines of stderr kept for the failure report: enough for a long traceback.
_KEEP_LINES = 200
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: it exited with `code`, or `signal` killed it (then code is None).

    Both are None if the status is UNKNOWN: the process was not a child of this one. A process that
    was lost with its host counts as killed; `text` then describes the loss.
    """

    code: int | None
    signal: int | None = None
    text: str = ""

    @property
    def is_success(self) -> bool:
        return self.code == 0

    @property
    def is_preempted(self) -> bool:
        """Whether it saved a checkpoint after it was asked to stop; another run can resume."""
        return self.code == PREEMPTED

    @property
    def shell_code(self) -> int:
        """The exit code that a shell shows: the process's own, or 128 + signal; 1 if unknown."""
        if self == UNKNOWN:
            return 1
        return 128 + self.signal if self.signal is not None else (self.code or 0)

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self == UNKNOWN:
            return "ended with unknown status"
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            known = signal.Signals(self.signal)
        except ValueError:
            return f"killed by signal {self.signal}"
        return f"killed by {known.name} ({(signal.strsignal(known) or 'signal').lower()})"


UNKNOWN = ExitStatus(None)


def die_with(launcher: int) -> None:
    """In a new child: have the kernel kill it when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The launcher may have died before prctl took effect; then no signal comes.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def peek_status(pid: int) -> ExitStatus | None:
    """Return how a child ended, or None while it runs. Does not reap the child."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    by_itself = info.si_code == os.CLD_EXITED
    return ExitStatus(info.si_status) if by_itself else ExitStatus(None, info.si_status)


def _status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; state "X" if the process is gone."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].decode().split()
    return ["X", *["0"] * 49]


def _channel(pid: int) -> str:
    """Return " in the kernel (FUNCTION)" for a sleeping process, or "" if the kernel hides it."""
    with suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        name = file.read().strip()
        return f" in the kernel ({name})" if name not in ("", "0") else ""
    return ""


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state; "X" if the process is gone."""
    return _stat(pid)[0]


class ChildProcess:
    """A child of this process that leads a session of its own. Not thread-safe."""

    def __init__(self, name: ProcessName, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.status: ExitStatus | None = None
        self.ended_s: float | None = None
        self.started_s = time.monotonic()
        self.stderr_tail: deque[str] = deque(maxlen=_KEEP_LINES)
        self.last_stdout = ""
        self.host_name = ""  # of another host
        self.reason = ""  # of its exit, if its host reported one

    @property
    def is_running(self) -> bool:
        return self.status is None

    @property
    def session(self) -> int | None:
        """The session that it leads on this host; None if it runs on another host."""
        return self.pid

    def check_ended(self) -> bool:
        """Return true once: at the first call after the process ended. Does not reap it."""
        if self.status is not None:
            return False
        self.status = self._peek()
        if self.status is None:
            return False
        self.ended_s = time.monotonic()
        return True

    def _peek(self) -> ExitStatus | None:
        return peek_status(self.pid)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and to everything in its process group."""
        # A zombie still exists, but a set-uid child may refuse the signal.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def is_frozen(self) -> bool:
        """Return whether the process is stopped (SIGSTOP, a debugger)."""
        return process_state(self.pid) in ("T", "t")

    def release(self) -> None:
        """Reap the process; call once, after it was killed or has ended."""
        raise NotImplementedError


class ProcessOutput:
    """Where a process writes its output, and where the launcher reads it.

    Two pipes if the process ends with its launcher: stdout and stderr stay apart, and a process
    that writes faster than the launcher reads blocks. One file if the process outlives its launcher
    (a detached job): a pipe without a reader would kill it at its next line.

    The child ends are passed to the process, then closed here.
    """

    def __init__(self, stdout: tuple[int, int], stderr: tuple[int, int], *, is_file: bool) -> None:
        self.stdout_fd, self.child_stdout = stdout
        self.stderr_fd, self.child_stderr = stderr
        self.is_file = is_file

    @classmethod
    def pipes(cls) -> ProcessOutput:
        """Create two pipes; raises LaunchError if there are no descriptors left."""
        made: list[tuple[int, int]] = []
        try:
            for _ in range(2):
                made.append(os.pipe())
                os.set_blocking(made[-1][0], False)
        except OSError as error:
            for fd in (fd for pair in made for fd in pair):
                os.close(fd)
            raise LaunchError(
                f"cannot create a pipe for the output of a process: {error.strerror}; raise the"
                " limit of open files (ulimit -n)"
            ) from error
        return cls(made[0], made[1], is_file=False)

    @classmethod
    def elsewhere(cls) -> ProcessOutput:
        """Return the output of a process on another host: nothing is read here."""
        return cls((-1, -1), (-1, -1), is_file=False)

    @classmethod
    def file(cls, path: Path) -> ProcessOutput:
        """Append to a file, and read from its present end; raises LaunchError."""
        try:
            far = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            near = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise LaunchError(
                f"{path}: {error.strerror}; name a directory you can write to with --log-dir"
            ) from error
        os.lseek(near, 0, os.SEEK_END)
        return cls((near, far), (near, far), is_file=True)

    def close_child_ends(self) -> None:
        """Close the child ends: only the process may hold them, so that its exit ends the pipe."""
        self._close(self.child_stdout, self.child_stderr)
        self.child_stdout = self.child_stderr = -1

    def close(self) -> None:
        self.close_child_ends()
        self._close(self.stdout_fd, self.stderr_fd)
        self.stdout_fd = self.stderr_fd = -1

    def _close(self, *fds: int) -> None:
        for fd in {fd for fd in fds if fd >= 0}:
            with suppress(OSError):
                os.close(fd)


class RankProcess(ChildProcess):
    """A worker, server or data worker. Used by the launcher's main thread only."""

    def __init__(self, name: ProcessName, pid: int, output: ProcessOutput) -> None:
        super().__init__(name, pid)
        self.output = output
        self.was_asked_for_stacks = False
        self._popen: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        name: ProcessName,
        argv: Sequence[str],
        environ: Mapping[str, str],
        output: ProcessOutput,
        *,
        dies_with_launcher: bool = True,
    ) -> RankProcess:
        """Start a command in a fresh interpreter; raises LaunchError."""
        launcher = os.getpid()
        try:
            popen = subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output.child_stdout,
                stderr=output.child_stderr,
                start_new_session=True,
                preexec_fn=(lambda: die_with(launcher)) if dies_with_launcher else None,
            )
        except (OSError, subprocess.SubprocessError) as error:
            output.close()
            words = error.strerror if isinstance(error, OSError) else str(error)
            raise LaunchError(
                f"{name} could not be started: {words} ({argv[0]}); check the limits"
                " with `paceline doctor` (processes, open files, memory)"
            ) from error
        output.close_child_ends()
        process = cls(name, popen.pid, output)
        process._popen = popen
        return process

    @property
    def is_exiting(self) -> bool:
        """Whether the process is exiting, even if waitid does not show it yet."""
        stat = _stat(self.pid)
        return stat[0] in "ZX" or bool(int(stat[6]) & _PF_EXITING)

    def describe_state(self) -> str:
        """Return the state of the process in words: "it runs", "it is stopped"."""
        letter = process_state(self.pid)
        inside = _channel(self.pid)
        if letter == "T":
            return f"it is stopped (kill -CONT {self.pid} resumes it)"
        if letter == "t":
            return "it is held by a debugger"
        if letter == "D":
            return f"it waits for a disk or a network file system{inside}"
        return f"it sleeps{inside}" if letter == "S" else "it runs"

    def ask_for_stacks(self) -> None:
        """Make the process print the stacks of its threads, if it has a handler for that."""
        if self.shows_stacks:
            self.was_asked_for_stacks = True
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, STACKS_SIGNAL)

    @property
    def shows_stacks(self) -> bool:
        """Whether it can print its stacks: it has called `pl.init()`."""
        caught = _status(self.pid).get("SigCgt", "0")
        return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)

    def release(self) -> None:
        """Reap the process and close the pipes; call once, after it was killed or has ended."""
        self._presume_killed()
        self.output.close()
        if self._popen is not None:
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=1.0)
        elif self.status is not None and peek_status(self.pid) is not None:
            os.waitpid(self.pid, 0)

    def _presume_killed(self) -> None:
        """Set the status of a process that SIGKILL could not end: it hangs in the kernel."""
        if self.status is None:
            self.status, self.ended_s = ExitStatus(None, signal.SIGKILL), time.monotonic()


class AdoptedProcess(RankProcess):
    """A process of a detached job that a former supervisor started. Its exit status is UNKNOWN.

    A pidfd pins the process, so that a reused pid is never signalled.
    """

    def __init__(self, name: ProcessName, pid: int, output: ProcessOutput) -> None:
        """Open its pidfd; raises ProcessLookupError if it has ended."""
        super().__init__(name, pid, output)
        self._pidfd = os.pidfd_open(pid)

    def _peek(self) -> ExitStatus | None:
        ready, _, _ = select.select([self._pidfd], [], [], 0)
        return UNKNOWN if ready else None

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group, unless the process has ended."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, number)
            super().signal_group(number)

    def release(self) -> None:
        self._presume_killed()
        self.output.close()
        os.close(self._pidfd)
