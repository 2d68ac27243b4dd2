"""One rank or server as an operating-system process: how it starts, how it ended, in words.

Each leads its own session, so that one signal reaches everything it started, and the
terminal's Ctrl-C reaches the launcher only, which then decides.

Death of the launcher. PR_SET_PDEATHSIG must be set in the child between fork and exec; that is done
in `preexec_fn`. The alternative, a trampoline program that sets it and then execs the script, costs
an interpreter start (10 ms bare, 60 ms with site-packages) per rank and opens a window in which the
rank is not yet protected. What speaks against preexec_fn is Python code running in a forked child
while other threads hold locks. It does not apply here: ranks are started from the launcher's main
thread (the signal is bound to the *thread* that forked), the first ones before the display thread
exists, and the function calls only what was looked up beforehand.

A rank that ended stays a zombie until it is released, at the end of the job or when it is replaced
(waitid with WNOWAIT): as long as it is there, its pid, and so the number of its session and process
group, cannot be given to a stranger.
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

from paceline.errors import LaunchError
from paceline.launcher.processes.pipes import Outlet
from paceline.observe.telemetry.waiting import STACKS_SIGNAL
from paceline.runtime.preemption import PREEMPTED
from paceline.runtime.process_names import Seat

_PR_SET_PDEATHSIG = 1
_PF_EXITING = 0x4
# Enough for a long traceback; lines are cut for the report, not for the screen or the log.
_KEEP_LINES = 200
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: by itself with `code`, or by `signal` (then code is None).

    With neither it is UNKNOWN: the process was not our child.
    """

    code: int | None
    signal: int | None = None

    @property
    def is_success(self) -> bool:
        return self.code == 0

    @property
    def is_preempted(self) -> bool:
        """It was asked to stop, has saved, and can go on in another run."""
        return self.code == PREEMPTED

    @property
    def shell_code(self) -> int:
        """The exit code a shell would show: the process's own, or 128 + signal; 1: not known."""
        if self == UNKNOWN:
            return 1
        return 128 + self.signal if self.signal is not None else (self.code or 0)

    def __str__(self) -> str:
        if self == UNKNOWN:
            return "ended, how is not known"
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            known = signal.Signals(self.signal)
        except ValueError:
            return f"killed by signal {self.signal}"
        return f"killed by {known.name} ({(signal.strsignal(known) or 'signal').lower()})"


UNKNOWN = ExitStatus(None)


def die_with(launcher: int) -> None:
    """In a fresh child: be killed when the thread that forked it ends, and so with its process."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The launcher may have died before prctl took effect; then nobody would tell us.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def peek_status(pid: int) -> ExitStatus | None:
    """Return how a child ended, without reaping it, or None while it runs."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    by_itself = info.si_code == os.CLD_EXITED
    return ExitStatus(info.si_status) if by_itself else ExitStatus(None, info.si_status)


def _status(pid: int) -> dict[str, str]:
    """What the kernel says about a process, by name; nothing when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _stat(pid: int) -> list[str]:
    """Return what the kernel says about a process, beginning with its state; "X": it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].decode().split()
    return ["X", *["0"] * 49]


def _channel(pid: int) -> str:
    """Name, in brackets, the function of the kernel in which a process sleeps, if that is told."""
    with suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        name = file.read().strip()
        return f" in the kernel ({name})" if name not in ("", "0") else ""
    return ""


def process_state(pid: int) -> str:
    """Return the letter that the kernel has for a process's state; "X" when there is none."""
    return _stat(pid)[0]


class ChildProcess:
    """A child of this process that leads a session of its own. Not thread-safe."""

    def __init__(self, seat: Seat, pid: int) -> None:
        self.seat = seat
        self.pid = pid
        self.status: ExitStatus | None = None
        self.ended_s: float | None = None
        self.started_s = time.monotonic()
        self.stderr_tail: deque[str] = deque(maxlen=_KEEP_LINES)
        self.last_stdout = ""

    @property
    def is_running(self) -> bool:
        return self.status is None

    def check_ended(self) -> bool:
        """Look whether the process has ended, without reaping it; true when it just has."""
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
        """Send a signal to the process and to what it started in its process group."""
        # Gone without being reaped is impossible, but a set-uid child may refuse us.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def is_frozen(self) -> bool:
        """Tell whether the process is stopped (SIGSTOP, a debugger) and so cannot do its part."""
        return process_state(self.pid) in ("T", "t")

    def release(self) -> None:
        """Reap the process; call once, when it was told to end."""
        raise NotImplementedError


class RankProcess(ChildProcess):
    """A started rank or server. Used by the launcher's main thread only.

    `outlet` is where its output is read; the process itself has the far ends.
    """

    def __init__(self, seat: Seat, pid: int, outlet: Outlet) -> None:
        super().__init__(seat, pid)
        self.outlet = outlet
        self.was_asked_for_stacks = False
        self._popen: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        seat: Seat,
        argv: Sequence[str],
        environ: Mapping[str, str],
        outlet: Outlet,
        *,
        dies_with_launcher: bool = True,
    ) -> RankProcess:
        """Start a command; raises LaunchError."""
        launcher = os.getpid()
        try:
            popen = subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=outlet.far_stdout,
                stderr=outlet.far_stderr,
                start_new_session=True,
                preexec_fn=(lambda: die_with(launcher)) if dies_with_launcher else None,
            )
        except (OSError, subprocess.SubprocessError) as error:
            outlet.close()
            words = error.strerror if isinstance(error, OSError) else str(error)
            raise LaunchError(
                f"{seat} could not be started: {words} ({argv[0]}); check the limits"
                " with `paceline doctor` (processes, open files, memory)"
            ) from error
        outlet.close_far()
        process = cls(seat, popen.pid, outlet)
        process._popen = popen
        return process

    @property
    def is_exiting(self) -> bool:
        """Tell whether the process is on its way out, also when its end is not seen yet."""
        stat = _stat(self.pid)
        return stat[0] in "ZX" or bool(int(stat[6]) & _PF_EXITING)

    def describe_state(self) -> str:
        """Say in words what the kernel knows of the process: "it runs", "it is stopped"."""
        letter = process_state(self.pid)
        inside = _channel(self.pid)
        if letter == "T":
            return f"it is stopped (kill -CONT {self.pid} lets it go on)"
        if letter == "t":
            return "it is held by a debugger"
        if letter == "D":
            return f"it waits for a disk or a network file system{inside}"
        return f"it sleeps{inside}" if letter == "S" else "it runs"

    def ask_for_stacks(self) -> None:
        """Have the rank print where its threads are; one that does not know how is left alone."""
        if self.shows_stacks:
            self.was_asked_for_stacks = True
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, STACKS_SIGNAL)

    @property
    def shows_stacks(self) -> bool:
        """Tell whether it would print them: it has come as far as `pl.init()`."""
        caught = _status(self.pid).get("SigCgt", "0")
        return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)

    def release(self) -> None:
        """Reap the process and close the pipes; call once, when it was told to end."""
        self._presume_killed()
        self.outlet.close()
        if self._popen is not None:
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=1.0)
        elif self.status is not None and peek_status(self.pid) is not None:
            os.waitpid(self.pid, 0)

    def _presume_killed(self) -> None:
        """Settle the status of a process that SIGKILL could not end: it hangs in the kernel."""
        if self.status is None:
            self.status, self.ended_s = ExitStatus(None, signal.SIGKILL), time.monotonic()


class AdoptedProcess(RankProcess):
    """A process that somebody else started, and whose exit status is therefore not to be had.

    The launcher before us was killed; its processes went on. A descriptor pins each of them.
    """

    def __init__(self, seat: Seat, pid: int, outlet: Outlet) -> None:
        """Take hold of it; ProcessLookupError when it has ended."""
        super().__init__(seat, pid, outlet)
        self._pidfd = os.pidfd_open(pid)

    def _peek(self) -> ExitStatus | None:
        ready, _, _ = select.select([self._pidfd], [], [], 0)
        return UNKNOWN if ready else None

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group, unless that may be a stranger's by now."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, number)
            super().signal_group(number)

    def release(self) -> None:
        self._presume_killed()
        self.outlet.close()
        os.close(self._pidfd)
