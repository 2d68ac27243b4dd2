"""`paceline doctor`: what this machine and installation look like, and what is wrong with them.

The report is plain aligned text, meant to be pasted into a bug report: it holds versions, sizes and
limits, no environment variables and nothing secret. Exit code 1 when something is broken.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from paceline.cli import checks
from paceline.cli.checks import Finding

# Two interpreters that import torch on a busy machine; the job itself takes less than a second.
_SELF_TEST_LIMIT_S = 60.0

_SECTIONS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("versions", checks.versions),
    ("core", checks.core_and_compiler),
    ("machine", checks.cores_and_memory),
    ("shared memory", checks.shared_memory),
    ("network", checks.network),
    ("limits", checks.limits),
)


def doctor(*, run_self_test: bool) -> int:
    """Print the report; return 1 when something is broken, else 0."""
    problems: list[Finding] = []
    for title, examine in _SECTIONS:
        problems += _section(title, examine())
    if run_self_test:
        problems += _section("self-test", self_test())
    sys.stdout.write("\n")
    for finding in problems:
        grade = "broken" if finding.broken else "note"
        sys.stdout.write(f"{grade}: {finding.name}: {finding.found}. {finding.advice}\n")
    is_broken = any(finding.broken for finding in problems)
    if not is_broken:
        hint = "" if run_self_test else "; `paceline doctor --run` tries the engine"
        sys.stdout.write(f"ok: nothing is broken{hint}\n")
    return 1 if is_broken else 0


def _section(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print one section as it comes; return the findings that need attention."""
    sys.stdout.write(f"{title}\n")
    problems = []
    for finding in findings:
        mark = "!" if finding.broken else " "
        sys.stdout.write(f"{mark} {finding.name:<16} {finding.found}\n")
        sys.stdout.flush()
        if finding.broken or finding.advice:
            problems.append(finding)
    return problems


def self_test() -> Iterator[Finding]:
    """Run a real job of two ranks on the engine and check its numbers."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "-n",
        "2",
        "-m",
        "paceline.launcher.selftest",
    ]
    started_s = time.monotonic()
    try:
        job = subprocess.run(
            command, capture_output=True, text=True, timeout=_SELF_TEST_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        found = f"no end after {_SELF_TEST_LIMIT_S:.0f} s"
        yield Finding("2 ranks", found, f"run it yourself: {' '.join(command[1:])}", broken=True)
        return
    took = f"{time.monotonic() - started_s:.1f} s"
    for line in job.stdout.splitlines():
        if line.startswith("[0] "):
            yield Finding("", line[4:])
    if job.returncode == 0:
        yield Finding("2 ranks", f"passed in {took}")
    else:
        for line in job.stderr.splitlines()[-20:]:
            yield Finding("", line)
        advice = "the lines above say which rank failed and where"
        yield Finding("2 ranks", f"failed with code {job.returncode} after {took}", advice, True)
