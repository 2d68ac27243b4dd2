"""Signs: what the kernel shows of a process while it runs, and what that says when it has ended.

Looked at a few times per second, because two facts are gone afterwards: since when a process has
been stopped (SIGSTOP, a debugger), and in which memory control group it was (the oldest version of
control groups forgets an ended process at once). Pure reading; decides nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from paceline.launcher.processes.process import ExitStatus, RankProcess, process_state
from paceline.runtime.formatting import memory_size
from paceline.runtime.machine import (
    OomCount,
    cgroup_dirs,
    memory_limit,
    oom_kills,
    processor_s,
)
from paceline.runtime.process_names import Seat

_STUCK_S = 8.0  # silent for so long: not for lack of processor time alone


class Lookout:
    """What is known about every process of ours, by rank."""

    def __init__(self) -> None:
        self._signs: dict[int, Signs] = {}
        self._busy_s: dict[Seat, float] = {}  # processor time, also of those that are gone

    def know(self, process: RankProcess) -> None:
        """Begin to look at a process."""
        self._signs[process.seat.rank] = Signs(process)

    def forget(self, process: RankProcess) -> None:
        self._signs.pop(process.seat.rank, None)

    def look(self, processes: Iterable[RankProcess], now_s: float) -> dict[int, float | None]:
        """Look at some; return by rank how long each has been stopped, None while it runs."""
        seen: dict[int, float | None] = {}
        for process in processes:
            signs = self._signs[process.seat.rank]
            signs.look(now_s)
            seen[process.seat.rank] = signs.stopped_for_s(now_s)
            busy_s = processor_s(process.pid) if process.seat.is_server else None
            if busy_s is not None:
                self._busy_s[process.seat] = busy_s
        return seen

    def busy_servers(self) -> dict[int, float]:
        """Return the processor time of each server, by number."""
        busy: dict[int, float] = {}
        for seat, busy_s in self._busy_s.items():
            busy[seat.number] = busy.get(seat.number, 0.0) + busy_s
        return busy

    def diagnosis(self, process: RankProcess) -> str:
        """Say how a process ended, and for which reason as far as the kernel shows one."""
        assert process.status is not None
        return self._signs[process.seat.rank].diagnosis(process.status)


class Silences:
    """Processes that are silent though they run: of a busy machine, or because they are stuck."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}  # by rank
        self._stuck: set[int] = set()

    def begin(self, rank: int, now_s: float) -> None:
        self._since_s[rank] = now_s

    def end(self, rank: int) -> bool:
        """Note a sign of life, or the end; return whether the silence was not yet told."""
        self._stuck.discard(rank)
        return self._since_s.pop(rank, None) is not None

    def stuck_since(self, now_s: float) -> list[tuple[int, float]]:
        """Return who has been silent for long, and how long, once each."""
        late = {rank: now_s - since_s for rank, since_s in self._since_s.items()}
        stuck = [(rank, silent_s) for rank, silent_s in late.items() if silent_s > _STUCK_S]
        for rank, _ in stuck:
            del self._since_s[rank]
            self._stuck.add(rank)
        return stuck

    def is_stuck(self, rank: int) -> bool:
        return rank in self._stuck


class Signs:
    """What is known about one process."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        self._stopped_s: float | None = None
        self._groups = cgroup_dirs("memory", pid=process.pid)
        self._kills = oom_kills(self._groups)  # when it was first seen in them
        # On the machine, at the last two looks: the last may have come after the kill in question.
        self._machine_kills = [OomCount.read().machine] * 2

    def look(self, now_s: float) -> None:
        """Take in how the process is now."""
        state = process_state(self._process.pid)
        if state in "ZX":
            return  # what was seen last is what counts
        if state not in "Tt":
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s
        groups = cgroup_dirs("memory", pid=self._process.pid)
        # One that is about to end is shown at the root already; it was not moved there.
        if len(groups) > 1 and groups != self._groups:
            self._groups, self._kills = groups, oom_kills(groups)
        self._machine_kills = self._machine_kills[1:] + [OomCount.read().machine]

    def stopped_for_s(self, now_s: float) -> float | None:
        """How long it has been stopped; None while it runs."""
        return None if self._stopped_s is None else now_s - self._stopped_s

    def diagnosis(self, status: ExitStatus) -> str:
        """Say how it ended, and for which reason as far as the kernel shows one."""
        if status.signal is None:
            return str(status)
        words = f"killed by signal {int(status.signal)}"
        if status.signal != signal.SIGKILL:
            return f"{words} ({_name(status.signal)})"
        if oom_kills(self._groups) > self._kills:
            limit, _ = memory_limit(self._groups)
            if limit is not None:
                return f"{words}, memory cgroup limit {memory_size(limit)} reached"
            return f"{words}, out of memory in its control group"
        if OomCount.read().machine > self._machine_kills[0]:
            return f"{words}, possibly out of memory: the OOM killer was active on this machine"
        return words


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return signal.strsignal(number) or "unknown"
