"""What earlier calls of the gate have found, and how long it counts.

reached   by file of tests: which tests reach which place, and how long they take. Counts while
          that file and all modules with places are the same.
killed    counts while the module of the place and the file of the test that failed are the same,
          and the test still reaches the place. So a new test, or a change elsewhere, does not
          start everything again.
survived  counts while all modules with places and all tests are the same: any new test may
          see it. The tests that have passed so far are kept, so a call can stop between two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mutation_points import Mutant, files
from mutation_runs import ROOT

STATE = ROOT / "build" / "laggard" / "mutants.json"


@dataclass
class Result:
    """How one mutant ended, or how far it is."""

    killer: str = ""  # the test that failed
    sign: str = ""  # what it saw
    seconds: float = 0.0
    passed: list[str] = field(default_factory=list)  # tests that did not see it
    is_complete: bool = False  # killed, or passed all tests that reach it
    digest: str = ""  # of all that the result depends on


@dataclass
class Reached:
    """What the tests of one file reach."""

    digest: str
    tests_of: dict[str, list[str]]  # by place
    seconds_of: dict[str, float]  # by test


def digest_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


class Progress:
    """The results of all calls."""

    def __init__(self, suite: Sequence[str], hints: dict[str, str]) -> None:
        """`suite`: files of tests; `hints`: tests that have killed a mutant before."""
        state = json.loads(STATE.read_text()) if STATE.exists() else {}
        self._suite = list(suite)
        self.hints: dict[str, str] = {**hints, **state.get("hints", {})}
        found = {name: Reached(**saved) for name, saved in state.get("reached", {}).items()}
        self._reached = {
            name: reached
            for name, reached in found.items()
            if name in suite and reached.digest == self.reach_digest(name)
        }
        self._results = {name: Result(**saved) for name, saved in state.get("results", {}).items()}

    def reach_digest(self, test_file: str) -> str:
        return digest_of([*files(), ROOT / test_file])

    def files_to_reach(self) -> list[str]:
        """Return the files of tests that have to run without a change first."""
        return [name for name in self._suite if name not in self._reached]

    def note_reached(self, test_file: str, reached: Reached) -> None:
        self._reached[test_file] = reached
        self._write()

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach a place: the one that failed last time, then quick ones."""
        seconds_of: dict[str, float] = {}
        for reached in self._reached.values():
            for test in reached.tests_of.get(mutant.name, ()):
                seconds_of[test] = reached.seconds_of.get(test, 1e9)
        hint = self.hints.get(mutant.name, "")
        return sorted(seconds_of, key=lambda test: (test != hint, seconds_of[test]))

    def result_of(self, mutant: Mutant) -> Result:
        """Return what is known about a mutant of the current code."""
        result = self._results.get(mutant.name)
        if result is None or result.digest != self._digest(mutant, result):
            return Result()
        tests = self.tests_of(mutant)
        if result.killer and result.killer not in tests:
            return Result()
        result.is_complete = bool(result.killer) or set(tests) <= set(result.passed)
        return result

    def note(self, mutant: Mutant, result: Result) -> None:
        result.digest = self._digest(mutant, result)
        self._results[mutant.name] = result
        if result.killer:
            self.hints[mutant.name] = result.killer
        self._write()

    def _digest(self, mutant: Mutant, result: Result) -> str:
        tests = [result.killer] if result.killer else result.passed
        of_tests = sorted({ROOT / test.partition("::")[0] for test in tests})
        return digest_of([*([mutant.path] if result.killer else files()), *of_tests])

    def _write(self) -> None:
        state: dict[str, Any] = {
            "hints": self.hints,
            "reached": {name: asdict(reached) for name, reached in self._reached.items()},
            "results": {name: asdict(result) for name, result in self._results.items()},
        }
        STATE.parent.mkdir(parents=True, exist_ok=True)
        STATE.write_text(json.dumps(state, indent=1))
