"""examples/trainer: the loop by hand and pl.Trainer print the same numbers, alone and together."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support import run_processes
from support.environs import base_environ

TRAINER = Path(__file__).resolve().parents[2] / "examples" / "trainer"
FILES = ("by_hand.py", "with_trainer.py")


def lines_of(output: str) -> list[str]:
    """Return the line of each epoch."""
    return re.findall(r"epoch \d+: test loss [\d.]+, accuracy [\d.]+", output)


def run(tmp_path: Path, *words: str) -> list[str]:
    command = [sys.executable, "-m", "paceline", "run", "--log-dir", "none", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return lines_of(done.stdout)


def run_alone(tmp_path: Path, *commands: list[str]) -> list[list[str]]:
    """Run scripts as the only processes of their jobs, forked with torch loaded."""

    def body(number: int) -> None:
        os.chdir(tmp_path)
        sys.argv = list(commands[number])
        runpy.run_path(sys.argv[0], run_name="__main__")

    outcomes = run_processes(body, [base_environ(str(tmp_path))] * len(commands), timeout_s=110)
    assert [o.status for o in outcomes] == [0] * len(outcomes), "\n".join(map(str, outcomes))
    return [lines_of(outcome.output) for outcome in outcomes]


def test_they_are_short():
    for name in FILES:
        assert len((TRAINER / name).read_text().splitlines()) <= 100


def require_same(by_hand: list[str], with_trainer: list[str]) -> None:
    assert len(by_hand) == 5 and by_hand == with_trainer
    assert float(by_hand[-1].rpartition(" ")[2]) > 0.9  # guessing: 0.1


def test_both_print_the_same_alone(tmp_path):
    require_same(*run_alone(tmp_path, *([str(TRAINER / name)] for name in FILES)))


@pytest.mark.parametrize(
    "options",
    [
        ["-n", "2"],
        pytest.param(["-n", "2", "-s", "1", "--pace", "ps"], marks=pytest.mark.slow),
        pytest.param(["--mesh", "pp=2"], marks=pytest.mark.slow),
    ],
    ids=["two workers", "through a server", "two stages"],
)
def test_both_print_the_same_together(options, tmp_path):
    require_same(*(run(tmp_path, *options, str(TRAINER / name)) for name in FILES))


def test_the_trainer_goes_on_where_it_was(tmp_path):
    command = [str(TRAINER / "with_trainer.py"), "--save", "saved"]
    (lines,) = run_alone(tmp_path, command)
    assert len(lines) == 5 and len(list((tmp_path / "saved").glob("step-*"))) == 3
    assert run_alone(tmp_path, command) == [[]], "there is nothing left to do"


def test_a_pace_that_runs_free(tmp_path):
    options = ["-n", "2", "-s", "1", "--pace", "ssp:3"]
    lines = run(tmp_path, *options, str(TRAINER / "with_trainer.py"), "--epochs", "2")
    assert len(lines) == 2 and float(lines[-1].rpartition(" ")[2]) > 0.6
