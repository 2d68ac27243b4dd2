"""The gate of the work on devices: remove each wait, record and hold, and see the tests fail.

    python tests/device/mutants.py               all mutants (an hour on two cores)
    python tests/device/mutants.py --seconds 240 some of them; the next call continues
    python tests/device/mutants.py --list        what would be removed
    python tests/device/mutants.py --only device_route

For each mutant the device tests run with one module replaced. The test that failed last time runs
first, alone; then the quick ones, then all of them, until one fails. A mutant for which no test
fails has survived. Those that change nothing are in equivalent_mutants.txt, with the reason; for
any other a test is missing.
The files of the checkout are never changed: an import hook in the environment replaces the module.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from mutation_points import SOURCE, Mutant, files, mutants_of  # noqa: E402

ROOT = HERE.parents[1]
EQUIVALENT = HERE / "equivalent_mutants.txt"
STATE = ROOT / "build" / "laggard" / "mutants.json"  # of earlier calls
LIMIT_S = 900
# Tests of the harness and of choices say nothing about order.
LEFT_OUT = ("test_detection.py", "test_mutation.py", "test_doctor.py", "test_device_choice.py")
# Tried first, on one schedule: they are quick and find most.
FIRST = ("test_route_order.py", "test_device_route.py", "test_device_training.py")
HOOK = """
import importlib.util, os, sys

class Replacing:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MUTANT_MODULE"]:
            return importlib.util.spec_from_file_location(name, os.environ["MUTANT_FILE"])

sys.meta_path.insert(0, Replacing())
"""


@dataclass
class Result:
    mutant: Mutant
    killer: str  # the test that failed; "" if it survived
    sign: str  # what it saw
    seconds: float


def equivalents() -> dict[str, str]:
    """Return the mutants that are known to change nothing, with the reason."""
    known: dict[str, str] = {}
    for line in EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else ():
        if line and not line.startswith("#"):
            name, _, reason = line.partition(" -- ")
            if not reason.strip():
                sys.exit(f"{EQUIVALENT}: no reason after ' -- ' in: {line}")
            known[name] = reason
    return known


def suite() -> list[str]:
    """Return the files of tests that have to see a change, the quick ones first."""
    names = sorted({file.name for file in HERE.glob("test_*.py")} - {*LEFT_OUT, *FIRST})
    return [f"tests/device/{name}" for name in (*FIRST, *names)]


def run_tests(directory: str, mutant: Mutant | None, tests: list[str]) -> tuple[bool, str, str]:
    """Return whether the tests passed, the first that failed, and what it saw."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if mutant:
        # Under its own name: tests look for it in stacks.
        changed = Path(directory, "changed", mutant.path.name)
        changed.parent.mkdir(exist_ok=True)
        changed.write_text(mutant.source())
        Path(directory, "sitecustomize.py").write_text(HOOK)
        module = ".".join(mutant.path.relative_to(SOURCE).with_suffix("").parts)
        paths = [directory, environ.get("PYTHONPATH", "")]
        environ |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "MUTANT_MODULE": module,
            "MUTANT_FILE": str(changed),
        }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False, "", f"no end within {LIMIT_S} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run:\n{ended.stdout[-3000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 0, failed.group(1) if failed else "", sign_of(ended.stdout)


SIGNS = (
    (r"laggard found \d+ races", "race"),
    (r"touched (?:pinned|device) memory", "touch of closed memory"),
    (r"unregistered while a copy", "memory unregistered under a copy"),
    (r"did not end within|Timeout", "no end"),
    (r"^E +(.*(?:Error|assert).*)", ""),
)


def sign_of(output: str) -> str:
    """Return how a bug has shown itself, in a few words."""
    for pattern, name in SIGNS:
        if found := re.search(pattern, output, re.MULTILINE):
            return name or found.group(1)[:100]
    return "no sign"


def try_mutant(mutant: Mutant, killer: str | None, tests: list[str]) -> Result:
    """Run the tests on one mutant until one fails."""
    began = time.monotonic()
    compile(mutant.source(), str(mutant.path), "exec")
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as directory:
        if killer and "::" in killer and (ROOT / killer.split("::")[0]).exists():
            passed, failed, sign = run_tests(directory, mutant, [killer])
            if not passed:
                return Result(mutant, failed or killer, sign, time.monotonic() - began)
        quick = [f"tests/device/{name}" for name in FIRST]
        passed, failed, sign = run_tests(directory, mutant, ["-k", "lazy", *quick])
        if passed:
            passed, failed, sign = run_tests(directory, mutant, tests)
        killed_by = "" if passed else failed or "no test in particular"
        return Result(mutant, killed_by, sign, time.monotonic() - began)


def fingerprint() -> str:
    """Return a hash of all that a result depends on."""
    digest = hashlib.sha256()
    tests = sorted({*HERE.glob("*.py")} - {Path(__file__).resolve()})
    for path in (*files(), *tests):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Progress:
    """The results of earlier calls. They count if code and tests are the same; else as hints."""

    def __init__(self) -> None:
        state = json.loads(STATE.read_text()) if STATE.exists() else {}
        self.killers: dict[str, str] = state.get("killers", {})
        now = fingerprint()
        self._state: dict[str, Any] = {
            "fingerprint": now,
            "killers": self.killers,
            "tried": state["tried"] if state.get("fingerprint") == now else {},
            "is_sound": state.get("fingerprint") == now and state["is_sound"],
        }

    @property
    def tried(self) -> dict[str, str]:
        """By mutant, the test that failed; "" for a survivor."""
        found: dict[str, str] = self._state["tried"]
        return found

    @property
    def is_sound(self) -> bool:
        """Whether the tests have passed without a change."""
        return bool(self._state["is_sound"])

    def note_sound(self) -> None:
        self._state["is_sound"] = True
        self._write()

    def add(self, result: Result) -> None:
        self.killers[result.mutant.name] = self.tried[result.mutant.name] = result.killer
        self._write()

    def _write(self) -> None:
        STATE.parent.mkdir(parents=True, exist_ok=True)
        STATE.write_text(json.dumps(self._state, indent=1))


def judge(tried: dict[str, str], wanted: list[str], known: dict[str, str], *, is_all: bool) -> int:
    """Print survivors, and entries of the list that are wrong; return the exit status."""
    tried = {name: killer for name, killer in tried.items() if name in wanted}
    survived = {name for name, killer in tried.items() if not killer}
    missing = sorted(survived - known.keys())
    killed = sorted(name for name in known if tried.get(name))
    gone = sorted(known.keys() - set(wanted)) if is_all else []
    print(
        f"{len(wanted)} mutants: {len(tried) - len(survived)} killed,"
        f" {len(survived & known.keys())} equivalent, {len(missing)} survived,"
        f" {len(wanted) - len(tried)} not tried yet"
    )
    for title, names in (
        ("survived, and no test is known to see it", missing),
        ("listed as equivalent, and killed", killed),
        ("listed as equivalent, and not in the code", gone),
    ):
        for name in names:
            print(f"  {title}: {name}")
    return 1 if missing or killed or gone else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="remove each wait and see the device tests fail")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--seconds", type=float, default=1e9, help="start none after this time")
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side")
    parser.add_argument("--tests", nargs="*", default=suite(), help="what has to fail")
    options = parser.parse_args(arguments)
    everything = [mutant for path in files() for mutant in mutants_of(path)]
    chosen = [mutant for mutant in everything if options.only in mutant.name]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.path.relative_to(ROOT)}:{mutant.line}: {mutant.name}")
        print(f"{len(chosen)} mutants")
        return 0
    progress, began_s = Progress(), time.monotonic()
    left = [mutant for mutant in chosen if mutant.name not in progress.tried]
    if left and not progress.is_sound:
        with tempfile.TemporaryDirectory() as directory:
            passed, failed, sign = run_tests(directory, None, options.tests)
        if not passed:
            sys.exit(f"the tests fail without a change: {failed} ({sign})")
        progress.note_sound()

    def attempt(mutant: Mutant) -> Result | None:
        if time.monotonic() - began_s > options.seconds:
            return None
        return try_mutant(mutant, progress.killers.get(mutant.name), options.tests)

    with ThreadPoolExecutor(options.jobs) as pool:
        for result in filter(None, pool.map(attempt, left)):
            progress.add(result)
            state = f"{result.sign} in {result.killer}" if result.killer else "SURVIVED"
            print(f"{result.seconds:5.0f} s  {result.mutant.name}: {state}", flush=True)
    names = [mutant.name for mutant in chosen]
    return judge(progress.tried, names, equivalents(), is_all=chosen == everything)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
