"""`paceline jobs` lists the running jobs of this user, `paceline logs` prints their output."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ConfigError, LaunchError
from paceline.launcher.job_registry import FoundJob, find_job
from paceline.launcher.job_registry import jobs as running_jobs
from paceline.runtime.config import inherited_environ

_LOG = re.compile(r"(rank|server|data-worker)-(\d+)\.log\Z")
_LETTERS = {"rank": "", "server": "s", "data-worker": "d"}


def jobs() -> int:
    """Print a line for each running job of this user on this host."""
    found = sorted(running_jobs(inherited_environ()), key=lambda job: job.facts.name)
    if not found:
        sys.stdout.write("no job of yours runs on this host\n")
        return 0
    rows = [("name", "state", "hosts", "command"), *map(_row, found)]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        sys.stdout.write("  ".join([*cells, row[3]]).rstrip() + "\n")
    return 0


def _row(job: FoundJob) -> tuple[str, str, str, str]:
    facts = job.facts
    if not job.is_supervised:
        state = "no supervisor"
    elif facts.launcher_host:
        state = f"launcher on {facts.launcher_host}"
    else:
        state = "in the background" if facts.is_detached else f"pid {facts.supervisor}"
    return facts.name, state, ",".join(facts.hosts) or "this one", facts.command


def logs(name: str | None, processes: Sequence[str], num_lines: int) -> int:
    """Print the last lines of each process of a job, or of those that are named."""
    if num_lines < 1:
        raise ConfigError(f"--lines {num_lines}: expected a number from 1 on, for example 20")
    facts = find_job(name, inherited_environ()).facts
    if not facts.log_dir:
        raise LaunchError(f"job {facts.name} keeps no logs; start jobs with --log-dir DIR")
    directory = Path(facts.log_dir)
    if not directory.is_dir():
        where = f" on host {facts.launcher_host}" if facts.launcher_host else ""
        raise LaunchError(f"the logs of job {facts.name} are in {directory}{where}; look there")
    found = {_label(path.name): path for path in directory.iterdir() if _LOG.match(path.name)}
    unknown = [label for label in processes if label not in found]
    if unknown:
        known = ", ".join(sorted(found, key=_order))
        raise ConfigError(f"--process {unknown[0]}: job {facts.name} has {known}")
    for label in processes or sorted(found, key=_order):
        with found[label].open(errors="backslashreplace") as file:
            for line in deque(file, maxlen=num_lines):
                sys.stdout.write(f"[{label}] {line.rstrip()}\n")
    return 0


def _label(file_name: str) -> str:
    match = _LOG.match(file_name)
    assert match is not None
    return f"{_LETTERS[match[1]]}{match[2]}"


def _order(label: str) -> tuple[str, int]:
    letter = label[0] if label[0].isalpha() else ""
    return letter, int(label.removeprefix(letter))
