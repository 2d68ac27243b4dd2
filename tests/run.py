"""What `make test` runs: the tests, three files side by side, and a second look at what failed.

Tests of distributed behaviour start real processes, which share two cores with those of two other
files. If very few fail, they are run once more, alone. One that fails again has failed; one that
passes is UNSTABLE: there is a race in it, or in what it tests, and it is named at the end of all
output, so that somebody looks. More than a few failures are no matter of load, and stay failures.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 3  # that get a second look
SIDE_BY_SIDE = ("-m", "not slow", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")


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


def main(arguments: list[str]) -> int:
    failures = Failures()
    status = int(pytest.main([*SIDE_BY_SIDE, *arguments], plugins=[failures]))
    names = list(failures.names)
    was_alone = "-n0" in arguments
    if status != pytest.ExitCode.TESTS_FAILED or failures.has_others or was_alone:
        return status
    if len(names) > MOST:
        print(f"\nmake test: {len(names)} failed; up to {MOST} would get a second look, alone")
        return status
    print(f"\nmake test: a second look at {len(names)}, alone\n", flush=True)
    command = [sys.executable, "-m", "pytest", "-v", "-n0", *names]
    if subprocess.run(command, check=False).returncode != 0:
        return status
    for name in names:
        print(f"make test: UNSTABLE: {name} failed beside other tests, and passed alone")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
