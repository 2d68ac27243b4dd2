"""A worker is killed in the middle of the steps that are traced: the others' trace is there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from support.trace_checks import Trace

_TRAIN = """
    import os, signal, time
    import torch
    import paceline as pl

    job = pl.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while job.steps_done < 40:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        if job.env.rank == 1 and job.steps_done == 25:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_sent_before_a_loss_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_TRAIN))
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--min", "1"]
    done = subprocess.run(
        [*command, "--max", "2", "--log-dir", "kept", "--trace", "4:30", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "paceline: trace of steps 4 to 29, " in done.stderr, done.stderr
    trace = Trace(tmp_path / "kept" / "trace.json")
    assert trace.steps("rank 0") == list(range(4, 30))
    lost = trace.steps("rank 1")
    # Sent once a second: of its 22 steps the last ones may be missing.
    assert 3 <= len(lost) <= 22 and lost == list(range(4, 4 + len(lost)))
