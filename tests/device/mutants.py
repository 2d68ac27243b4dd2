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
mutation_progress.py says how long a result counts.

A test that does not end fails at its time limit, and on a busy machine any test may. So a mutant
counts as killed by that only if the same test ends without the change and once more not with it.
The files of the checkout are never changed (mutation_runs.py). Ranks are forked from one process,
so a mutant costs what its tests cost.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from mutation_points import Mutant, all_mutants  # noqa: E402
from mutation_progress import Progress, Reached, Result  # noqa: E402
from mutation_runs import NO_END, ROOT, changed_modules, reach, run_tests  # noqa: E402

from support.ranks import ForkServer  # noqa: E402

EQUIVALENT = HERE / "equivalent_mutants.txt"
TABLE = HERE / "mutants.md"  # the last complete run
# Tests of the harness and of choices say nothing about order.
AT_ONCE = 8  # tests in one run of pytest
LEFT_OUT = ("test_detection.py", "test_mutation.py", "test_doctor.py", "test_device_choice.py")


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


def attempt(
    mutant: Mutant, result: Result, tests: list[str], until_s: float
) -> tuple[Mutant, Result]:
    """Run the next few of these tests on one mutant, unless the time is over; in a process of the
    pool. `result` is how far earlier calls came.
    """
    began_s, left = time.monotonic(), [t for t in tests if t not in result.passed]
    some = left[:AT_ONCE] if began_s < until_s else []
    if some:
        compile(mutant.source(), mutant.path, "exec")  # fails if the file was changed meanwhile
        with changed_modules({mutant.path: mutant.source()}) as directory:
            run = run_tests(directory, some, "-x")
            failed = "" if run.passed else run.failed or some[0]
            if failed and (NO_END not in run.sign or _hangs_again(mutant, directory, failed)):
                result.killer, result.sign = failed, run.sign
        # What did not end only because the machine was busy says nothing.
        through = some.index(failed) + 1 if failed else len(some)
        result.passed += [] if result.killer else some[:through]
    result.is_complete = bool(result.killer) or len(result.passed) == len(tests)
    if not tests:
        result.sign = "no test reaches it"
    result.seconds += time.monotonic() - began_s
    return mutant, result


def _hangs_again(mutant: Mutant, directory: Path, test: str) -> bool:
    with changed_modules({mutant.path: mutant.path.read_text()}) as unchanged:
        if not run_tests(unchanged, [test]).passed:
            return False
    return not run_tests(directory, [test]).passed


def look_what_is_reached(progress: Progress, mutants: list[Mutant], until_s: float) -> bool:
    """Run the tests without a change, file by file; return whether all have run."""
    for name in progress.files_to_reach():
        if time.monotonic() > until_s:
            return False
        digest = progress.reach_digest(name)
        progress.note_reached(name, Reached(digest, *reach(mutants, name)))
        print(f"passes without a change: {name}", flush=True)
    ForkServer.shut_down()  # it would be shared by the processes that try mutants
    return True


def hints_of_table() -> dict[str, str]:
    """Return by mutant the test that failed in the last complete run."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [re.fullmatch(r"\| `` (.+) `` \| (.*) \| `(.+)` \|", line) for line in lines]
    return {row[1]: f"tests/device/{row[3]}" for row in rows if row}


def write_table(results: dict[str, Result], known: dict[str, str]) -> None:
    """Write what is known about each mutant of the current code."""
    lines = [
        "# The gate: what each removed wait, record and hold was killed by",
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
        sign = result.sign
        if not result.is_complete:
            sign = f"not tried with all tests yet ({len(result.passed)} have not seen it)"
        elif not result.killer:
            sign = f"equivalent: {known[name]}" if name in known else "SURVIVED"
        lines.append(f"| `` {name} `` | {sign.replace('|', '/')} | {test} |")
    TABLE.write_text("\n".join(lines) + "\n")


def judge(results: dict[str, Result], known: dict[str, str], *, is_all: bool) -> int:
    """Print survivors, and entries of the list that are wrong; return the exit status."""
    tried = {name: result for name, result in results.items() if result.is_complete}
    survived = {name for name, result in tried.items() if not result.killer}
    missing = sorted(survived - known.keys())
    killed = sorted(name for name in known if name in tried and tried[name].killer)
    gone = sorted(known.keys() - results.keys()) if is_all else []
    hung = sum(NO_END in result.sign for result in tried.values() if result.killer)
    print(
        f"{len(results)} mutants: {len(tried) - len(survived)} killed ({hung} because a test did"
        f" not end), {len(survived & known.keys())} equivalent, {len(missing)} survived,"
        f" {len(results) - len(tried)} not tried yet"
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
    until_s = time.monotonic() + options.seconds
    progress = Progress(suite(), hints_of_table())
    if options.table:
        results = {m.name: progress.result_of(m) for m in everything}
        write_table(results, equivalents())
        left = sum(not result.is_complete for result in results.values())
        print(f"{left} mutants of {len(results)} are not tried yet")
        return 1 if left else 0
    if look_what_is_reached(progress, everything, until_s):
        try_all(progress, chosen, options.jobs, until_s)
    found = {m.name: progress.result_of(m) for m in chosen}
    return judge(found, equivalents(), is_all=chosen == everything)


def try_all(progress: Progress, mutants: list[Mutant], jobs: int, until_s: float) -> None:
    """Try the mutants without a result: first those that a known test kills, and each with a few
    tests before any gets more.
    """
    known = equivalents()

    def is_left(mutant: Mutant) -> bool:
        return not progress.result_of(mutant).is_complete

    order = sorted(mutants, key=lambda m: (m.name in known, m.name not in progress.hints))
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        while (left := list(filter(is_left, order))) and time.monotonic() < until_s:
            running = [
                pool.submit(attempt, m, progress.result_of(m), progress.tests_of(m), until_s)
                for m in left
            ]
            for ended in as_completed(running):
                mutant, result = ended.result()
                progress.note(mutant, result)
                if result.is_complete:
                    state = f"{result.sign} in {result.killer}" if result.killer else "SURVIVED"
                    print(f"{result.seconds:5.0f} s  {mutant.name}: {state}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
