"""Run device tests with changed code, and find out which tests reach which place.

The files of the checkout are never changed: ranks replace code of functions (support/changed_code).
Tests run in a fork of this process, and their ranks in forks of one server, so that nothing is
imported for a mutant.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  # tests need all this, and every run is a fork of this process
from mutation_points import SOURCE, Mutant

import paceline  # noqa: F401
import support.devices  # noqa: F401
from support.ranks import ForkServer

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1800
NO_END = "no end"


@dataclass
class Run:
    """How one run of tests ended."""

    passed: bool
    failed: str = ""  # the first test that failed
    sign: str = ""  # what it saw
    seconds_of: dict[str, float] | None = None  # by test


@contextmanager
def changed_modules(sources: dict[Path, str]) -> Iterator[Path]:
    """Yield a directory for `run_tests` with these modules."""
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as name:
        directory = Path(name)
        for path, source in sources.items():
            module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            (directory / f"{module}.py").write_text(source)
        yield directory


def run_tests(directory: Path, tests: Sequence[str], *more: str) -> Run:
    """Run tests in this order, with the changed modules of the directory."""
    ForkServer.get()  # of this process: the next run uses it, too
    output, xml = directory / "output.txt", directory / "tests.xml"
    pid = os.fork()
    if pid == 0:
        _run_here(directory, output, ["-q", f"--junitxml={xml}", *more, *tests])
    deadline_s = time.monotonic() + LIMIT_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Run(False, "", f"{NO_END} within {LIMIT_S} s")
        time.sleep(0.05)
    status, said = os.waitstatus_to_exitcode(ended[1]), output.read_text()
    if status not in (0, 1):
        raise RuntimeError(f"pytest could not run ({status}):\n{said[-5000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    failed = found.group(1) if found else ""
    return Run(status == 0, failed, sign_of(said), _times(xml))


def _run_here(directory: Path, output: Path, arguments: list[str]) -> None:
    """Run pytest in this process, which is a fork, and end it."""
    status = 3
    try:
        os.setpgid(0, 0)
        os.chdir(ROOT)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["CHANGED_CODE"] = str(directory)
        status = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _times(xml: Path) -> dict[str, float]:
    cases = ElementTree.parse(xml).iter("testcase")
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for case in cases
    }


SIGNS = (
    (r"laggard found \d+ races", "race"),
    (r"touched (?:pinned|device) memory", "touch of closed memory"),
    (r"unregistered while a copy", "memory unregistered under a copy"),
    (r"did not end within|Timeout|longer than \S+ s", NO_END),
    (r"^E +.*?error (\w+\(.*)", ""),  # of a rank
    (r"^E +(.*(?:Error|assert).*)", ""),
    (r"^E +rank \d+ (ended with -?[1-9]\d*)", ""),
)


def sign_of(output: str) -> str:
    """Return how a bug has shown itself, in a few words."""
    for pattern, name in SIGNS:
        if found := re.search(pattern, output, re.MULTILINE):
            return name or found.group(1)[:100]
    return "no sign"


def reach(
    mutants: Sequence[Mutant], test_file: str
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Run a file of tests without a change; return by mutant the tests that reach its place, and by
    test how long it took. Ends the program if a test fails.
    """
    numbers = {mutant.name: number for number, mutant in enumerate(mutants)}
    names = list(numbers)
    sources = {
        path: _instrumented(path, list(group), numbers)
        for path, group in groupby(mutants, key=lambda mutant: mutant.path)
    }
    with changed_modules(sources) as directory:
        run = run_tests(directory, [test_file])
        noted = directory / "reached"
        lines = noted.read_text().splitlines() if noted.exists() else []
    if not run.passed:
        sys.exit(f"the tests fail without a change: {run.failed} ({run.sign})")
    tests_of: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        number, _, test = line.partition("\t")
        tests_of.setdefault(names[int(number)], []).append(test)
    return tests_of, run.seconds_of or {}


def _instrumented(path: Path, mutants: Sequence[Mutant], numbers: dict[str, int]) -> str:
    """Return a file in which every place notes that it was reached; its lines stay as they are."""
    text, inserts = path.read_text(), list[tuple[int, int, int, str]]()
    for mutant in mutants:
        number = numbers[mutant.name]
        note = f"(__import__('support.changed_code').changed_code.reached('{number}'), "
        # At one position an inner expression ends first, and an outer one begins first.
        inserts.append((mutant.end, 0, -mutant.begin, ")[1]"))
        inserts.append((mutant.begin, 1, -mutant.end, note))
    pieces, at = list[str](), 0
    for position, _, _, words in sorted(inserts):
        pieces += [text[at:position], words]
        at = position
    return "".join([*pieces, text[at:]])
