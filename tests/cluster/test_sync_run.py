"""`paceline run --hosts ... --sync`: the script runs in the copy of each host."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.cluster

SCRIPT = """
import os
import paceline as pl
from helper import WORD

pl.init()
print(f"rank {pl.rank()} {WORD} {os.getcwd()}")
"""


def test_every_host_runs_its_own_copy(cluster, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    (project / "helper.py").write_text("WORD = 'copied'\n")
    command = [sys.executable, "-m", "paceline", "run", "--hosts", "a:1,b:1,c:1", "--sync"]
    done = cluster["a"].run([*command, "train.py"], cwd=project)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "copied" in line)
    assert len(lines) == 3, done.stdout + done.stderr
    assert lines[0].endswith(str(project))
    assert str(cluster["b"].home) in lines[1] and str(cluster["c"].home) in lines[2]
    assert "copied 2 files" in done.stderr
