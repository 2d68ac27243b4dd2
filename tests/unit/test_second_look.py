"""tests/run.py: few failures are looked at again, alone; what fails again has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "run.py"
UNSTABLE = """
import pathlib
def test_once():
    flag = pathlib.Path(__file__).with_name("flag")
    was_there = flag.exists()
    flag.touch()
    assert was_there
"""
MIXED = UNSTABLE + "def test_bad(): assert False"
BAD = "import pytest\n@pytest.mark.parametrize('n', range({}))\ndef test_bad(n): assert n < 0\n"


@pytest.mark.parametrize(
    ("script", "passes", "words", "unstable"),
    [
        (UNSTABLE, True, "UNSTABLE: test_it.py::test_once failed beside other tests", 1),
        (MIXED, False, "a second look at 2, alone", 1),
        (BAD.format(4), False, "4 failed; up to 3 would get a second look", 0),
        ("import nothing_of_that_name", False, "ModuleNotFoundError", 0),
    ],
)
def test_what_failed_is_looked_at_again(
    script: str, passes: bool, words: str, unstable: int, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(script, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(RUN), "test_it.py", "-n1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert words in done.stdout
    assert done.stdout.count("UNSTABLE") == unstable
    ended = f"{'passed' if passes else 'failed'}, {unstable} unstable"
    assert done.stdout.splitlines()[-1].startswith(f"make test: {ended}")
    [line] = (tmp_path / ".pytest_cache" / "unstable.txt").read_text().splitlines()
    assert ended in line and ("test_it.py::test_once" in line) == bool(unstable)
