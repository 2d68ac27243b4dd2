"""Measure a script for the planner: run copies of it for some steps, then stop them.

Each copy is a job of one worker, so nothing is exchanged. As many copies run at the same time as
one host of the plan has workers: they compete for cores and memory as the workers will. A copy is
stopped as Ctrl-C does. Nothing of it stays but its directory, which the caller removes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.planning.child_job import (
    STOPPED,
    Child,
    require_training,
    start_job,
    stop_jobs,
)
from paceline.planner.measured_profile import LEAST_STEPS, read_measured, timed_steps
from paceline.planner.profile import ModelProfile
from paceline.runtime.console import say

WARM_UP = 3  # steps that are not counted: the first ones allocate memory
STEPS = 12
_PATIENCE_S = 45.0  # a script that is slow is measured with fewer steps
_START_S = 120.0  # until the first step
_POLL_S = 0.1


def measure_script(
    target: Sequence[str],
    scratch: Path,
    *,
    copies: int,
    threads: int,
    steps: int = STEPS,
    patience_s: float = _PATIENCE_S,
) -> ModelProfile:
    """Run `copies` of a script (`target`: its words on the command line) and return its profile."""
    name = Path(next((word for word in target if not word.startswith("-")), "script")).stem
    directories = [scratch / f"copy-{number}" for number in range(copies)]
    started: list[Child] = []
    peak = 0
    try:
        # One by one, so that `started` has all that run if one cannot be started.
        started.extend(_start(target, directory, threads, steps) for directory in directories)
        peak = _follow(started, directories, steps, patience_s)
    finally:
        stop_jobs(started)
    _require_steps(name, started, directories)
    return read_measured(directories, name=name, threads=threads, process_bytes=peak)


def _start(target: Sequence[str], directory: Path, threads: int, steps: int) -> Child:
    traced = f"{WARM_UP + 1}:{WARM_UP + 1 + steps}"
    words = ["-n", "1", "--threads-per-worker", str(threads), "--trace", traced]
    return start_job([*words, *target], directory)


def _follow(
    started: Sequence[Child],
    directories: Sequence[Path],
    steps: int,
    patience_s: float,
) -> int:
    """Wait until all copies have done their steps; return the memory of the largest process."""
    begin_s, first_s, said_s, peak = time.monotonic(), 0.0, 0.0, 0
    while True:
        done = [
            max((len(one) for one in timed_steps(path).values()), default=0) for path in directories
        ]
        peak = max([peak, *(_largest_child(one.pid) for one in started if one.poll() is None)])
        if min(done) >= WARM_UP + steps + 1 or any(one.poll() is not None for one in started):
            return peak
        now_s = time.monotonic()
        if min(done) and not first_s:
            first_s = now_s
        if first_s and now_s - first_s > patience_s and min(done) > WARM_UP + LEAST_STEPS:
            return peak
        if now_s - begin_s > _START_S + patience_s * 4 or (
            not first_s and now_s - begin_s > _START_S
        ):
            return peak
        if now_s - begin_s > 2 + said_s:
            say(f"measuring: {min(done)} of {WARM_UP + steps} steps")
            said_s = now_s - begin_s + 3
        time.sleep(_POLL_S)


def _largest_child(pid: int) -> int:
    """Return the largest resident memory among the descendants of a launcher, in bytes."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", encoding="ascii") as f:
                parents[int(entry)] = int(f.read().rpartition(")")[2].split()[1])
    family, largest = {pid}, 0
    for child in sorted(parents):
        if parents[child] in family:
            family.add(child)
            with contextlib.suppress(OSError), open(f"/proc/{child}/statm", encoding="ascii") as f:
                resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                largest = max(largest, resident)
    return largest


def _require_steps(name: str, started: Sequence[Child], directories: Sequence[Path]) -> None:
    """Raise UsageError if a copy could not be measured, with what it printed."""
    # A copy that failed comes first: the others were stopped because of it.
    pairs = sorted(zip(started, directories, strict=True), key=lambda p: p[0].returncode in STOPPED)
    for one, directory in pairs:
        counted = max((len(times) for times in timed_steps(directory).values()), default=0)
        least = WARM_UP + LEAST_STEPS
        require_training(name, one, directory, counted, least, "while it was measured")
