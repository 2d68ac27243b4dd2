"""The gate of the work on devices: remove each wait, record and hold, and see the tests fail.

    python tests/device/mutants.py               all mutants
    python tests/device/mutants.py --seconds 240 some of them; the next call continues
    python tests/device/mutants.py --list        what would be removed
    python tests/device/mutants.py --only device_route
    python tests/device/mutants.py --jobs 2      two mutants side by side
    python tests/device/mutants.py --table       write mutants.md from the results

First all device tests run without a change, and note which places they reach. Then for each mutant
the tests that reach its place run with one module replaced, until one fails: the test that failed
last time first, then the quick ones. A mutant for which no test fails has survived. Those that
change nothing are in equivalent_mutants.txt, with the reason; for any other a test is missing.

A test that does not end fails at its time limit, and on a busy machine any test may. So a mutant
counts as killed by that only if the same test ends without the change and once more not with it.
The files of the checkout are never changed (mutation_runs.py). Ranks are forked from one process,
so a mutant costs what its tests cost.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from mutation_points import Mutant, all_mutants, files  # noqa: E402
from mutation_runs import NO_END, ROOT, changed_modules, reach, run_tests  # noqa: E402

EQUIVALENT = HERE / "equivalent_mutants.txt"
TABLE = HERE / "mutants.md"  # the last complete run
STATE = ROOT / "build" / "laggard" / "mutants.json"  # of earlier calls
# Tests of the harness and of choices say nothing about order.
LEFT_OUT = ("test_detection.py", "test_mutation.py", "test_doctor.py", "test_device_choice.py")


@dataclass
class Result:
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
    """Return the files of tests that have to see a change."""
    names = sorted({file.name for file in HERE.glob("test_*.py")} - set(LEFT_OUT))
    return [f"tests/device/{name}" for name in names]


def try_mutant(mutant: Mutant, hint: str, tests: list[str]) -> Result:
    """Run these tests on one mutant until one fails, the one that failed last time first."""
    began = time.monotonic()
    ordered = [hint, *(t for t in tests if t != hint)] if hint in tests else list(tests)
    with changed_modules({mutant.path: mutant.source()}) as directory:
        while ordered:
            run = run_tests(directory, ordered, "-x")
            if run.passed:
                break
            failed = run.failed or ordered[0]
            if NO_END not in run.sign or _hangs_again(mutant, directory, failed):
                return Result(failed, run.sign, time.monotonic() - began)
            ordered = ordered[ordered.index(failed) + 1 :]  # of no use: the machine was busy
    sign = "" if tests else "no test reaches it"
    return Result("", sign, time.monotonic() - began)


def attempt(
    mutant: Mutant, hint: str, tests: list[str], until_s: float
) -> tuple[Mutant, Result] | None:
    """Try a mutant unless the time is over; in a process of the pool."""
    return None if time.monotonic() > until_s else (mutant, try_mutant(mutant, hint, tests))


def _hangs_again(mutant: Mutant, directory: Path, test: str) -> bool:
    with changed_modules({mutant.path: mutant.path.read_text()}) as unchanged:
        if not run_tests(unchanged, [test]).passed:
            return False
    return not run_tests(directory, [test]).passed


def fingerprint() -> str:
    """Return a hash of all that a result depends on."""
    digest = hashlib.sha256()
    for path in (*files(), *(ROOT / name for name in suite())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Progress:
    """The results of earlier calls. They count if code and tests are the same; else as hints."""

    def __init__(self) -> None:
        state = json.loads(STATE.read_text()) if STATE.exists() else {}
        now = fingerprint()
        is_same = state.get("fingerprint") == now
        self.hints: dict[str, str] = {**hints_of_table(), **state.get("hints", {})}
        self.reached: dict[str, list[str]] = state["reached"] if is_same else {}
        self.results = {
            name: Result(**found) for name, found in (state["results"] if is_same else {}).items()
        }
        self._fingerprint = now

    def note_reached(self, reached: dict[str, list[str]]) -> None:
        self.reached = reached
        self._write()

    def add(self, mutant: Mutant, result: Result) -> None:
        self.results[mutant.name] = result
        if result.killer:
            self.hints[mutant.name] = result.killer
        self._write()

    def _write(self) -> None:
        state: dict[str, Any] = {
            "fingerprint": self._fingerprint,
            "hints": self.hints,
            "reached": self.reached,
            "results": {name: asdict(result) for name, result in self.results.items()},
        }
        STATE.parent.mkdir(parents=True, exist_ok=True)
        STATE.write_text(json.dumps(state, indent=1))


def hints_of_table() -> dict[str, str]:
    """Return by mutant the test that failed in the last complete run."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [re.fullmatch(r"\| `` (.+) `` \| (.*) \| `(.+)` \|", line) for line in lines]
    return {row[1]: f"tests/device/{row[3]}" for row in rows if row}


def write_table(results: dict[str, Result], known: dict[str, str]) -> None:
    """Write the results of a complete run."""
    lines = [
        "# The last complete run of the gate",
        "",
        "Written by `python tests/device/mutants.py --table`. Each line is one place of the code"
        " (module, function, kind, what was removed), how the bug has shown itself, and the test"
        " that failed. The tests in this table run first the next time.",
        "",
        "| place | sign | test |",
        "| --- | --- | --- |",
    ]
    for name, result in results.items():
        test = f"`{result.killer.removeprefix('tests/device/')}`" if result.killer else ""
        sign = result.sign if result.killer else f"equivalent: {known.get(name, '?')}"
        lines.append(f"| `` {name} `` | {sign.replace('|', '/')} | {test} |")
    TABLE.write_text("\n".join(lines) + "\n")


def judge(
    results: dict[str, Result], wanted: list[str], known: dict[str, str], *, is_all: bool
) -> int:
    """Print survivors, and entries of the list that are wrong; return the exit status."""
    tried = {name: result for name, result in results.items() if name in wanted}
    survived = {name for name, result in tried.items() if not result.killer}
    missing = sorted(survived - known.keys())
    killed = sorted(name for name in known if name in tried and tried[name].killer)
    gone = sorted(known.keys() - set(wanted)) if is_all else []
    hung = sum(NO_END in result.sign for result in tried.values() if result.killer)
    print(
        f"{len(wanted)} mutants: {len(tried) - len(survived)} killed ({hung} because a test did"
        f" not end), {len(survived & known.keys())} equivalent, {len(missing)} survived,"
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
    parser.add_argument("--table", action="store_true", help="write mutants.md, run nothing")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--seconds", type=float, default=1e9, help="start none after this time")
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side")
    options = parser.parse_args(arguments)
    everything = all_mutants()
    chosen = [mutant for mutant in everything if options.only in mutant.name]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.path.relative_to(ROOT)}:{mutant.line}: {mutant.name}")
        print(f"{len(chosen)} mutants")
        return 0
    progress, began_s = Progress(), time.monotonic()
    left = [mutant for mutant in chosen if mutant.name not in progress.results]
    if options.table:
        if left:
            sys.exit(f"{len(left)} mutants are not tried yet")
        in_order = {m.name: progress.results[m.name] for m in everything}
        write_table(in_order, equivalents())
        return 0
    if left and not progress.reached:
        progress.note_reached(reach(everything, suite()))

    until_s = began_s + options.seconds
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        running = [
            pool.submit(
                attempt, m, progress.hints.get(m.name, ""), progress.reached[m.name], until_s
            )
            for m in left
        ]
        for ended in as_completed(running):
            if (found := ended.result()) is None:
                continue
            mutant, result = found
            progress.add(mutant, result)
            state = f"{result.sign} in {result.killer}" if result.killer else "SURVIVED"
            print(f"{result.seconds:5.0f} s  {mutant.name}: {state}", flush=True)
    names = [mutant.name for mutant in chosen]
    return judge(progress.results, names, equivalents(), is_all=chosen == everything)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
