"""A worker joins by hand from another host, which is a network namespace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from story_wires import wires

COMMAND = [sys.executable, "-m", "paceline"]
TRAIN = textwrap.dedent("""
    import os, time
    import torch
    import paceline as pl

    job = pl.init()
    model = torch.nn.Linear(4, 2)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    is_guest = os.environ.get("PACELINE_HOST_ID") == "a"
    together, deadline_s = 0, time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if together >= 20 if is_guest else together and pl.world_size() == 1:
            break
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        together += pl.world_size() == 2
        time.sleep(0.01)
    print("steps together:", together, flush=True)
""")


@pytest.mark.slow
@pytest.mark.root
def test_a_worker_joins_from_another_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with wires("here", "a") as net:
        here = {**environ, "PACELINE_BIND": net.address("here")}
        run = [*COMMAND, "run", "-n", "1", "--max", "2", str(script)]
        with subprocess.Popen(run, env=here, stdout=subprocess.PIPE, text=True) as launcher:
            try:
                coordinator, secret, job_id = _address(environ)
                far = {**environ, "PACELINE_BIND": net.address("a"), "PACELINE_HOST_ID": "a"}
                join = ["join", "--coordinator", coordinator, "--secret-file", secret, job_id]
                words = [*net.inside("a"), *COMMAND, *join, str(script)]
                guest = subprocess.run(
                    words, env=far, capture_output=True, text=True, timeout=80, check=False
                )
                said, _ = launcher.communicate(timeout=40)
            finally:
                launcher.terminate()
    assert guest.returncode == 0, guest.stderr
    assert "steps together: 20" in guest.stdout
    assert launcher.returncode == 0 and re.search(r"steps together: (19|20|21)\n", said), said


def _address(environ: dict[str, str]) -> tuple[str, str, str]:
    """Ask the job, as its user would, until its worker is there."""
    text = ""
    for _ in range(60):
        asked = [*COMMAND, "status"]
        done = subprocess.run(asked, env=environ, capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        found = re.search(r"id (\w+),.*coordinator (\S+), secret file (\S+)", text, re.DOTALL)
        if found and "worker 0 (" in text:
            return found[2], found[3], found[1]
    raise AssertionError(f"the job did not begin: {text}")
