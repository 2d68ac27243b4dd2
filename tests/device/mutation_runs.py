"""Run device tests with changed modules, and find out which tests reach which place.

The files of the checkout are never changed: a directory on PYTHONPATH holds changed modules, and an
import hook there (sitecustomize) replaces the ones of the checkout, in every process of a test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from mutation_points import SOURCE, Mutant

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1800
NO_END = "no end"
HOOK = '''
import importlib.util, os, sys

HERE = os.path.dirname(os.path.abspath(__file__))
SEEN = set()

class Replacing:
    def find_spec(self, name, path=None, target=None):
        file = os.path.join(HERE, "changed", *name.split(".")) + ".py"
        if name.startswith("paceline.") and os.path.exists(file):
            return importlib.util.spec_from_file_location(name, file)

def reached(number):
    """Note that the running test has come to a place."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (test, number) not in SEEN:
        SEEN.add((test, number))
        with open(os.path.join(HERE, "reached"), "a") as file:
            file.write(f"{number}\\t{test}\\n")

sys.meta_path.insert(0, Replacing())
'''


@dataclass
class Run:
    """How one run of tests ended."""

    passed: bool
    failed: str = ""  # the first test that failed
    sign: str = ""  # what it saw
    seconds_of: dict[str, float] | None = None  # by test


@contextmanager
def changed_modules(sources: dict[Path, str]) -> Iterator[Path]:
    """Yield a directory for `run_tests` that replaces these modules."""
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as name:
        directory = Path(name)
        (directory / "sitecustomize.py").write_text(HOOK)
        for path, source in sources.items():
            compile(source, str(path), "exec")
            changed = directory / "changed" / path.relative_to(SOURCE)
            changed.parent.mkdir(parents=True, exist_ok=True)
            changed.write_text(source)
        yield directory


def run_tests(directory: Path, tests: Sequence[str], *more: str) -> Run:
    """Run tests in this order, with the modules that the directory replaces."""
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    xml = directory / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={xml}", *more, *tests]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return Run(False, "", f"{NO_END} within {LIMIT_S} s")
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run:\n{ended.stdout[-3000:]}{ended.stderr[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    failed = found.group(1) if found else ""
    return Run(ended.returncode == 0, failed, sign_of(ended.stdout), _times(xml))


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
    (r"^E +(.*(?:Error|assert).*)", ""),
)


def sign_of(output: str) -> str:
    """Return how a bug has shown itself, in a few words."""
    for pattern, name in SIGNS:
        if found := re.search(pattern, output, re.MULTILINE):
            return name or found.group(1)[:100]
    return "no sign"


def reach(mutants: Sequence[Mutant], tests: Sequence[str]) -> dict[str, list[str]]:
    """Run all tests without a change; return by mutant the tests that reach its place, the quick
    ones first. Ends the program if a test fails.
    """
    numbers = {mutant.name: number for number, mutant in enumerate(mutants)}
    sources = {
        path: _instrumented(path, list(group), numbers)
        for path, group in groupby(mutants, key=lambda mutant: mutant.path)
    }
    with changed_modules(sources) as directory:
        run = run_tests(directory, tests)
        noted = directory / "reached"
        lines = noted.read_text().splitlines() if noted.exists() else []
    if not run.passed:
        sys.exit(f"the tests fail without a change: {run.failed} ({run.sign})")
    seconds_of = run.seconds_of or {}
    by_number: dict[int, set[str]] = {}
    for line in lines:
        number, _, test = line.partition("\t")
        by_number.setdefault(int(number), set()).add(test)
    return {
        name: sorted(by_number.get(number, ()), key=lambda test: seconds_of.get(test, 1e9))
        for name, number in numbers.items()
    }


def _instrumented(path: Path, mutants: Sequence[Mutant], numbers: dict[str, int]) -> str:
    """Return a file in which every place notes that it was reached; its lines stay as they are."""
    text, inserts = path.read_text(), list[tuple[int, int, int, str]]()
    for mutant in mutants:
        note = f"(__import__('sitecustomize').reached({numbers[mutant.name]}), "
        # At one position an inner expression ends first, and an outer one begins first.
        inserts.append((mutant.end, 0, -mutant.begin, ")[1]"))
        inserts.append((mutant.begin, 1, -mutant.end, note))
    pieces, at = list[str](), 0
    for position, _, _, words in sorted(inserts):
        pieces += [text[at:position], words]
        at = position
    return "".join([*pieces, text[at:]])
