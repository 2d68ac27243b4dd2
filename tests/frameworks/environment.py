"""Runs scripts on workers in the environment of the frameworks, which `make frameworks-test` makes.

A script has CHECKS, functions that every worker calls in order. One job runs them all, because
importing a framework takes longer than most checks. A worker prints a line for each that passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"


@cache
def _has(module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


def require(*modules: str) -> None:
    """Skip a test of frameworks that are not installed."""
    if not PYTHON.exists():
        pytest.skip("make frameworks-test installs the frameworks (3 GB) in .venv-frameworks")
    missing = [module for module in modules if not _has(module)]
    if missing:
        pytest.skip(f".venv-frameworks has no {', '.join(missing)}: make frameworks-test")


def quiet_environ(**more: str) -> dict[str, str]:
    """Return the environment of a job: one thread each, no warnings of frameworks."""
    return {
        **os.environ,
        "PACELINE_LOG_DIR": "none",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def run_script(
    script: str,
    *arguments: str,
    options: Sequence[str] = ("-n", "2"),
    env: Mapping[str, str] | None = None,
    python: Path = PYTHON,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a script of this directory as a job of `paceline run`; return how it ended."""
    command = [python, "-m", "paceline", "run", *options, HERE / script, *arguments]
    return subprocess.run(
        [str(word) for word in command],
        env=quiet_environ(**(env or {})),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def assert_passed(ended: subprocess.CompletedProcess[str], *names: str, workers: int = 2) -> None:
    """Raise AssertionError unless every worker passed every check."""
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-6000:]
    for name in names:
        found = sum(line.endswith(f"passed {name}") for line in ended.stdout.splitlines())
        assert found == workers, f"{found} of {workers} workers passed {name}\n{output[-6000:]}"


def main(checks: Mapping[str, object]) -> None:
    """Run the checks that the command line names, on this worker."""
    for name in sys.argv[1:]:
        checks[name]()  # type: ignore[operator]
        print(f"passed {name}", flush=True)
