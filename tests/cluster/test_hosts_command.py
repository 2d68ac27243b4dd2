"""`paceline hosts` on real hosts: a host is added, used and removed while the job runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
COMMAND = [sys.executable, "-m", "paceline"]
TRAIN = """
import os, pathlib, time
import torch
import paceline as pl

job = pl.init()
model = torch.nn.Linear(4, 2)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
while not pathlib.Path("finish").exists():
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if pl.rank() == 0:
        pathlib.Path("draft").write_text(str(pl.world_size()))
        os.rename("draft", "size")
    time.sleep(0.02)
"""


@pytest.mark.timeout(300)
def test_a_host_is_added_used_and_removed(cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    size = tmp_path / "size"
    # nsenter changes the directory. Jobs of other tests on this machine must not be found.
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    paceline = ["env", f"--chdir={tmp_path}", f"XDG_RUNTIME_DIR={runtime}", *COMMAND]

    def command(*words: str) -> str:
        done = cluster["a"].run([*paceline, *words])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_for(count: str) -> None:
        deadline_s = time.monotonic() + 90
        while not (size.exists() and size.read_text() == count):
            assert time.monotonic() < deadline_s, f"never {count} workers"
            assert job.poll() is None, job.communicate()
            time.sleep(0.1)

    options = ["--hosts", "a:1,b:1", "--min", "1", "--max", "4"]
    job = cluster["a"].popen(
        [*paceline, "run", *options, "train.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for("2")
        assert command("hosts") == "a (1 slot): rank 0\nb (1 slot): rank 1\n"
        assert "host c is in the job" in command("hosts", "add", "c:2")
        command("scale", "-n", "4")
        wait_for("4")
        assert "c (2 slots): ranks 2-3" in command("hosts")
        assert "host b has left after" in command("hosts", "remove", "b")
        wait_for("3")
    finally:
        (tmp_path / "finish").touch()
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, out
