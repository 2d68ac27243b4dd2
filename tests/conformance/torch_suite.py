"""Runs PyTorch's own distributed tests on a backend and says which pass.

    python tests/conformance/torch_suite.py --backend paceline --world-size 4 --json out.json
    python tests/conformance/torch_suite.py --backend paceline -k all_reduce

The tests are those that PyTorch ships in its wheel (`distributed_test.py`). They know the built-in
backends by name; to run on another one, the module is loaded with the word "gloo" replaced by the
backend's name, so that exactly the tests for gloo apply (those for MPI too: `--stand-in gloo mpi`).
Each test runs in fresh processes, forked from this one, because importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
TIMEOUT_S = 90


def load_suite(backend: str, world_size: int, stand_ins: list[str]) -> type[unittest.TestCase]:
    """Return torch's test class, written for the given backend."""
    scratch = tempfile.mkdtemp(prefix="paceline-torch-suite-")
    owner = os.getpid()  # ranks are forked from here, and must leave it alone
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(scratch, ignore_errors=True))
    tempfile.tempdir = scratch  # torch's tests leave their own files behind
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(world_size))
    os.environ["INIT_METHOD"] = f"file://{scratch}/shared_init_file"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MASTER_PORT", "29500")  # shown by some tests, used by none
    import torch.testing._internal.common_distributed as common

    import paceline.runtime.torch_init  # noqa: F401  # once, and not in every rank
    from paceline.runtime.torch_plugin import register

    register()
    common.logger.setLevel("ERROR")
    for feature in common.DistTestCases.backend_feature.values():
        if "gloo" in feature:
            feature.add(backend)
    common.DistTestCases.backend_feature["plugin"].add(backend)
    common.TIMEOUT_DEFAULT = TIMEOUT_S
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    for word in stand_ins:
        text = text.replace(f'"{word}"', f'"{backend}"')
        text = text.replace(f"Backend.{word.upper()}", f"Backend.{backend.upper()}")
    # Ranks that do come may come seconds late where others use the machine as well.
    for limit_s, longer_s in ((1, 4), (2, 6)):
        old, new = (f"timeout = timedelta(seconds={n})\n" for n in (limit_s, longer_s))
        text = text.replace(old, new)
    # DDP reports gloo's environment variables for gloo only.
    text = text.replace(f'get("backend_name") == "{backend}"', 'get("backend_name") == "gloo"')
    suite = types.ModuleType("torch_suite_under_test")
    suite.__file__ = spec.origin
    sys.modules[suite.__name__] = suite
    exec(compile(text, spec.origin, "exec", dont_inherit=True), suite.__dict__)
    return _forking(suite)


def _forking(suite: types.ModuleType) -> type[unittest.TestCase]:
    import torch

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchSuite


class Outcomes(unittest.TestResult):
    """Notes what became of each test and says it while the run goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, object]] = {}
        self._began_s = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began_s = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        name, took_s = test.id().rpartition(".")[2], time.monotonic() - self._began_s
        self.outcomes[name] = {"outcome": outcome, "why": why, "seconds": round(took_s, 2)}
        sys.stdout.write(f"{outcome:8} {took_s:6.1f} s  {name}\n")
        if outcome == "failed":
            sys.stdout.write("    " + why.strip().replace("\n", "\n    ") + "\n")
        sys.stdout.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        self._note(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure  # type: ignore[assignment]


def run(
    backend: str, world_size: int, stand_ins: list[str], wanted: list[str], exact: bool
) -> dict[str, dict[str, object]]:
    cases = load_suite(backend, world_size, stand_ins)
    names = unittest.TestLoader().getTestCaseNames(cases)
    if exact:
        names = [name for name in names if name in wanted]
    elif wanted:
        names = [name for name in names if any(part in name for part in wanted)]
    result = Outcomes()
    for name in names:
        cases(name).run(result)
    return result.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="paceline")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument(
        "-k", dest="wanted", action="append", default=[], help="part of a test's name"
    )
    parser.add_argument(
        "--stand-in",
        nargs="+",
        default=["gloo"],
        help="backends whose tests apply; only mpi's have all_to_all on CPU",
    )
    parser.add_argument("--only", nargs="+", default=[], help="exact names")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    outcomes = run(
        asked.backend,
        asked.world_size,
        asked.stand_in,
        asked.only or asked.wanted,
        bool(asked.only),
    )
    counts = {
        kind: sum(o["outcome"] == kind for o in outcomes.values())
        for kind in ("passed", "failed", "skipped")
    }
    sys.stdout.write(f"{asked.backend}, {asked.world_size} ranks: {counts}\n")
    if asked.json:
        asked.json.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    return 1 if counts["failed"] or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
