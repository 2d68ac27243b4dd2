"""Jobs whose control connections are all encrypted, also those on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from run_support import Workbench

_TRAIN = """
    import sys
    import torch
    import paceline as pl
    pl.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    for step in range(30):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("cryptography" in sys.modules, f"{loss.item():.2g} below 0.1: {loss.item() < 0.1}")
"""


@pytest.mark.parametrize(
    "options", [(), ("--max", "3"), ("-s", "1", "--pace", "ps")], ids=["fixed", "elastic", "served"]
)
def test_a_job_trains_with_encrypted_control_connections(
    tmp_path: Path, options: Sequence[str]
) -> None:
    job = Workbench(tmp_path)
    script = job.script(_TRAIN)
    done = job.run("run", "-n", "2", *options, script, PACELINE_ENCRYPT="always")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2 and all("True" in line and "0.1: True" in line for line in lines), lines
    assert "refused" not in done.stderr
    assert job.left_behind() == []


def test_a_wrong_value_of_the_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = Workbench(tmp_path)
    done = job.run("run", "-n", "2", job.script("print('started')"), PACELINE_ENCRYPT="yes")
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert "PACELINE_ENCRYPT='yes': expected on, off or always" in done.stderr
