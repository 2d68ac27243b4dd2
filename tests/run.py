"""What `make test` runs: the tests, three files side by side, and a second look at what failed.

Tests of distributed behaviour start real processes, which share two cores with those of two other
files. If very few fail, they are run once more, alone. One that fails again has failed; one that
passes is UNSTABLE: there is a race in it, or in what it tests, and it is named at the end of all
output, so that somebody looks. More than a few failures are no matter of load, and stay failures.

The last line says how many were unstable, and UNSTABLE_LOG has a line for each run with the names.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

MOST = 3  # that get a second look
UNSTABLE_LOG = Path(".pytest_cache", "unstable.txt")  # where the tests are started
SIDE_BY_SIDE = (
    "-m",
    "not slow and not cluster",
    "-n",
    "3",
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
)


class Failures:
    """A pytest plugin that keeps the names of tests that failed, in whichever process they ran."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # in order, each once
        self.has_others = False  # what is no test failed: collecting, a process of pytest

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.has_others = self.has_others or report.failed


def record(status: int, unstable: Sequence[str]) -> int:
    """Print how the run ended and how many tests were unstable, note it, and return the status."""
    ended = "passed" if status == 0 else "failed"
    print(f"make test: {ended}, {len(unstable)} unstable ({UNSTABLE_LOG})", flush=True)
    UNSTABLE_LOG.parent.mkdir(exist_ok=True)
    with UNSTABLE_LOG.open("a", encoding="utf-8") as log:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(" ".join([now, f"{ended},", f"{len(unstable)} unstable", *unstable]) + "\n")
    return status


def passes_alone(name: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-v", "-n0", name]
    return subprocess.run(command, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    failures = Failures()
    status = int(pytest.main([*SIDE_BY_SIDE, *arguments], plugins=[failures]))
    names = list(failures.names)
    was_alone = "-n0" in arguments
    if status != pytest.ExitCode.TESTS_FAILED or failures.has_others or was_alone:
        return record(status, ())
    if len(names) > MOST:
        print(f"\nmake test: {len(names)} failed; up to {MOST} would get a second look, alone")
        return record(status, ())
    print(f"\nmake test: a second look at {len(names)}, alone\n", flush=True)
    unstable = [name for name in names if passes_alone(name)]
    for name in unstable:
        print(f"make test: UNSTABLE: {name} failed beside other tests, and passed alone")
    return record(status if len(unstable) < len(names) else 0, unstable)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
