"""Process monitor: what the kernel shows of running processes, and why one ended.

The launcher polls a few times per second, because the kernel keeps two facts only while a process
runs: since when it has been stopped (SIGSTOP, a debugger), and its memory control group (cgroup v1
forgets an ended process at once). The monitor only reads; it decides nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Protocol

from paceline.launcher.processes.process import ExitStatus, RankProcess, process_state
from paceline.runtime.formatting import memory_size
from paceline.runtime.machine import (
    OomCount,
    cgroup_dirs,
    memory_limit,
    oom_kills,
    processor_s,
)
from paceline.runtime.process_names import ProcessName

_STUCK_S = 8.0  # a silence that a busy machine does not explain


class Signs(Protocol):
    """What is known about one process."""

    def poll(self, now_s: float) -> None:
        """Read the state of the process now."""

    def stopped_for_s(self, now_s: float) -> float | None:
        """Return how long it has been stopped; None while it runs."""

    def busy_s(self) -> float | None:
        """Return its processor time, or None if it is unknown."""

    def diagnosis(self, status: ExitStatus) -> str:
        """Return how it ended, and the reason if the kernel shows one."""

    def reason(self, status: ExitStatus) -> str:
        """Return why the kernel killed it, or "" if it shows no reason."""


class ProcessMonitor:
    """What is known about every process of this launcher, by rank."""

    def __init__(self) -> None:
        self._signs: dict[int, Signs] = {}
        self._busy_s: dict[ProcessName, float] = {}  # processor time, also of ended processes

    def add(self, process: RankProcess, signs: Signs | None = None) -> None:
        """Begin to watch a process; `signs` has what another host reports about its own."""
        self._signs[process.name.rank] = signs or ProcessSigns(process)

    def remove(self, process: RankProcess) -> None:
        self._signs.pop(process.name.rank, None)

    def poll(self, processes: Iterable[RankProcess], now_s: float) -> dict[int, float | None]:
        """Read their state; return by rank how long each has been stopped, None while it runs."""
        seen: dict[int, float | None] = {}
        for process in processes:
            signs = self._signs[process.name.rank]
            signs.poll(now_s)
            seen[process.name.rank] = signs.stopped_for_s(now_s)
            busy_s = signs.busy_s() if process.name.is_server else None
            if busy_s is not None:
                self._busy_s[process.name] = busy_s
        return seen

    def busy_servers(self) -> dict[int, float]:
        """Return the processor time of each server, by number."""
        busy: dict[int, float] = {}
        for name, busy_s in self._busy_s.items():
            busy[name.number] = busy.get(name.number, 0.0) + busy_s
        return busy

    def diagnosis(self, process: RankProcess) -> str:
        """Return how a process ended, and the reason if the kernel shows one."""
        assert process.status is not None
        return self._signs[process.name.rank].diagnosis(process.status)

    def reason(self, process: RankProcess) -> str:
        """Return why the kernel killed a process that has ended, or "" if it shows no reason."""
        assert process.status is not None
        return self._signs[process.name.rank].reason(process.status)


class SilenceTracker:
    """Processes that run but send no heartbeat: the machine is busy, or they are stuck."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}  # by rank
        self._stuck: set[int] = set()

    def begin(self, rank: int, now_s: float) -> None:
        self._since_s[rank] = now_s

    def end(self, rank: int) -> bool:
        """End a silence: a heartbeat, or the exit; return whether it was not reported yet."""
        self._stuck.discard(rank)
        return self._since_s.pop(rank, None) is not None

    def newly_stuck(self, now_s: float) -> list[tuple[int, float]]:
        """Return ranks that have been silent for long, and how long; each once."""
        late = {rank: now_s - since_s for rank, since_s in self._since_s.items()}
        stuck = [(rank, silent_s) for rank, silent_s in late.items() if silent_s > _STUCK_S]
        for rank, _ in stuck:
            del self._since_s[rank]
            self._stuck.add(rank)
        return stuck

    def is_stuck(self, rank: int) -> bool:
        return rank in self._stuck


class ProcessSigns:
    """What is known about one process of this launcher."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._stopped_s: float | None = None
        self._groups = cgroup_dirs("memory", pid=process.pid)
        self._kills = oom_kills(self._groups)  # when it was first seen in them
        # On the machine, at the last two polls: the last may have come after the kill in question.
        self._machine_kills = [OomCount.read().machine] * 2

    def poll(self, now_s: float) -> None:
        """Read the state of the process now."""
        state = process_state(self._process.pid)
        if state in "ZX":
            return  # the last state before the exit counts
        if state not in "Tt":
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s
        groups = cgroup_dirs("memory", pid=self._process.pid)
        # The kernel shows an exiting process at the root group; it was not moved there.
        if len(groups) > 1 and groups != self._groups:
            self._groups, self._kills = groups, oom_kills(groups)
        self._machine_kills = self._machine_kills[1:] + [OomCount.read().machine]

    def stopped_for_s(self, now_s: float) -> float | None:
        """Return how long it has been stopped; None while it runs."""
        return None if self._stopped_s is None else now_s - self._stopped_s

    def busy_s(self) -> float | None:
        """Return its processor time, or None if it is unknown."""
        return processor_s(self._process.pid)

    def diagnosis(self, status: ExitStatus) -> str:
        """Return how it ended, and the reason if the kernel shows one."""
        if status.signal is None:
            return str(status)
        text = f"killed by signal {int(status.signal)}"
        if status.signal != signal.SIGKILL:
            return f"{text} ({_name(status.signal)})"
        reason = self.reason(status)
        return f"{text}, {reason}" if reason else text

    def reason(self, status: ExitStatus) -> str:
        """Return why the kernel killed it, or "" if it shows no reason."""
        if status.signal != signal.SIGKILL:
            return ""
        if oom_kills(self._groups) > self._kills:
            limit, _ = memory_limit(self._groups)
            if limit is not None:
                return f"memory cgroup limit {memory_size(limit)} reached"
            return "out of memory in its control group"
        if OomCount.read().machine > self._machine_kills[0]:
            return "possibly out of memory: the OOM killer was active on this machine"
        return ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return signal.strsignal(number) or "unknown"
