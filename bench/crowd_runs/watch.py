"""A job that runs under observation: what it took, and an end before memory gets short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_SPARE_MB = 4000  # of memory, below which a job is ended
_LOOK_S = 0.25


class Watch(threading.Thread):
    """Looks at a running job a few times a second, and ends it if memory gets short."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.looks: list[tuple[float, float]] = []  # time, the launcher's processor seconds
        self.kernel_kb: list[int] = []
        self.is_short = False

    def run(self) -> None:
        while (used_s := cpu_s(self.pid)) is not None:
            self.looks.append((time.time(), used_s))
            memory = meminfo()
            self.kernel_kb.append(kernel_kb(memory))
            if memory["MemAvailable"] < _SPARE_MB * 1024:
                self.is_short = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(_LOOK_S)

    def idle_share(self, begin_s: float, end_s: float) -> float:
        """Return the launcher's processor seconds in a second of this interval."""
        inside = [look for look in self.looks if begin_s <= look[0] <= end_s]
        if len(inside) < 2:
            return 0.0
        (first_s, first), (last_s, last) = inside[0], inside[-1]
        return (last - first) / (last_s - first_s)


def meminfo() -> dict[str, int]:
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows}


def kernel_kb(memory: dict[str, int]) -> int:
    return sum(memory[name] for name in ("Slab", "PageTables", "KernelStack"))


def cpu_s(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return None if fields[0] == "Z" else (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass
class Observed:
    """A job that has ended."""

    started_s: float
    ended_s: float
    cpu_s: float  # of all of its processes
    kernel_kb: int  # that the kernel kept more than before, at most
    reports: list[dict[str, Any]]  # the lines of JSON that its workers printed
    watch: Watch

    @property
    def launcher_s(self) -> float:
        """Processor seconds of the launcher, in which the coordinator runs."""
        return self.watch.looks[-1][1]


def run_observed(workers: int, arguments: Sequence[str], timeout_s: float) -> Observed:
    """Run a script with `paceline run`; SystemExit if it fails."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(workers), "--log-dir", "none"]
    before_kb, started_s = kernel_kb(meminfo()), time.time()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        watch = Watch(process.pid)
        watch.start()
        limit = threading.Timer(timeout_s, process.kill)
        limit.start()
        _, status, used = os.wait4(process.pid, 0)  # with its children, which it has reaped
        limit.cancel()
        ended_s = time.time()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        why = "memory got short" if watch.is_short else f"it ended with {process.returncode}"
        raise SystemExit(f"{workers} workers: {why}\n{text[-3000:]}")
    rows = [line[line.index("{") :] for line in text.splitlines() if '{"rank"' in line]
    return Observed(
        started_s,
        ended_s,
        used.ru_utime + used.ru_stime,
        max(watch.kernel_kb) - before_kb,
        [json.loads(row) for row in rows],
        watch,
    )
