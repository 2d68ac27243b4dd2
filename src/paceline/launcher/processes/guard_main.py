"""The guard: a small process that ends a job's processes if its launcher is killed.

The kernel kills each rank with the launcher (PR_SET_PDEATHSIG, see process.py), but not what a rank
has started: data loader workers, helpers, anything that ignores a closed pipe. The guard has its
own session and reads a pipe whose other end only the launcher holds. "end" on the pipe means that
the launcher has cleaned up; end of file without it means that the launcher is dead.

A process belongs to the job if its session is one that the launcher made for a rank, or if its
environment has PACELINE_JOB=<job id>, a random word that children inherit even if they make a
session of their own. Nothing else is ever signalled. The guard cannot find a process that has left
the session and also cleared its environment.

The guard of an agent also kills the agent if it stays stopped (SIGSTOP): its launcher has given the
host up by then, and nothing else would end the job's processes there. A launcher may be stopped.

This file is run by path with `python -I -S` (10 ms, nothing of the user's is imported), so it uses
the standard library only; the launcher imports `end_processes` for the ordinary end of a job.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator


def _session_of(pid: int) -> int | None:
    """Return the session of a live process, or None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name may hold spaces and brackets; the fields begin after the last one.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[3])


def _mark(job_id: str) -> bytes | None:
    """Return the variable that marks the job's processes; None for "": only sessions count."""
    return f"PACELINE_JOB={job_id}".encode() if job_id else None


def _carries_mark(pid: int, mark: bytes | None) -> bool:
    if mark is None:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return mark in environ.read().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def job_processes(job_id: str, sessions: Collection[int]) -> Iterator[int]:
    """Yield the pids of live processes of the job, except the calling process."""
    mark = _mark(job_id)
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        session = _session_of(int(name))
        if session is not None and (session in sessions or _carries_mark(int(name), mark)):
            yield int(name)


def _kill(pid: int, job_id: str, sessions: Collection[int]) -> None:
    """Kill one process; the pidfd pins it, so that a reused pid is never signalled."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _session_of(pid) in sessions or _carries_mark(pid, _mark(job_id)):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it ended meanwhile, or changed its user
    finally:
        os.close(handle)


def end_processes(job_id: str, sessions: Collection[int], *, within_s: float = 2.0) -> list[int]:
    """Kill the job's processes until there are none; return the pids that are still there.

    Scans again after each round because a process may start another one while it is being killed.
    """
    deadline = time.monotonic() + within_s
    while True:
        found = list(job_processes(job_id, sessions))
        if not found or time.monotonic() > deadline:
            return found
        for pid in found:
            _kill(pid, job_id, sessions)
        time.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def _lines(starter: int, stopped_s: int) -> Iterator[str]:
    """Yield what the starter writes; end with it, or kill it if it is stopped for so long."""
    text, stopped_for_s = b"", 0  # counts seconds in which this process runs, too
    while True:
        if stopped_s and not select.select([0], [], [], 1.0)[0]:
            stopped_for_s = stopped_for_s + 1 if _is_stopped(starter) else 0
            if stopped_for_s >= stopped_s:
                os.kill(starter, signal.SIGKILL)  # it holds the pipe, so the number is still its
                return
            continue
        data = os.read(0, 1 << 12)
        if not data:
            return
        *lines, text = (text + data).split(b"\n")
        yield from (line.decode() for line in lines)


def main(job_id: str, job_directory: str, stopped_s: int) -> None:
    """Read "session PID" and "forget PID" until the launcher ends the job or dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the launcher, never before it
    sessions: set[int] = set()
    for line in _lines(os.getppid(), stopped_s):
        words = line.split()
        if words == ["end"]:
            return
        if len(words) == 2 and words[0] == "session":
            sessions.add(int(words[1]))
        elif len(words) == 2 and words[0] == "forget":
            sessions.discard(int(words[1]))
    end_processes(job_id, sessions, within_s=10.0)
    shutil.rmtree(job_directory, ignore_errors=True)  # the next launcher sweeps what remains


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
