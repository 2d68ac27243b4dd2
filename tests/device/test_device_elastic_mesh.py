"""An elastic job with a mesh on devices: a process is killed, and its unit is replaced as a whole.

Under the launcher. Workers print the state of their part after each step; those that hold the same
part must agree on it, before the loss and after it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from support.devices import device_path

SCRIPT = """
import hashlib, os, signal, sys, time
import laggard
import torch
from laggard.pytest_plugin import schedule_named
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

job, device = pl.init(), pl.device()
torch.manual_seed(0)
data = torch.randn(512, 8)
labels = (data @ torch.randn(8, 4)).argmax(1)
loader = DataLoader(TensorDataset(data, labels), batch_size=16, shuffle=True, pin_memory=True)
layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
example = data[:16].to(device)
model, optimizer = pl.distribute(
    model, optimizer, loss=F.cross_entropy, example=example, microbatches=2
)
place, unit = job.mesh.unit_index(job.env.number), job.mesh.unit_of(job.env.number)

def digest():
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    local = [getattr(p, "to_local", lambda p=p: p)().cpu().contiguous() for p in params]
    return hashlib.blake2b(b"".join(p.numpy().tobytes() for p in local)).hexdigest()[:16]

with schedule_named(sys.argv[1]):
    steps_back = 0
    while steps_back < 5:
        for x, y in pl.shard(loader):
            changes = job.elastic.num_changes
            loss = model.train_step(x.to(device), y.to(device))
            print(f"step {job.steps_done} place {place} unit {unit}: {digest()} {loss:.5f}")
            if job.steps_done == 6 and job.env.rank < 4:
                open(f"done-{job.env.rank}", "w").close()
            if job.steps_done == 6 and job.env.rank == 3:
                while not all(os.path.exists(f"done-{rank}") for rank in range(4)):
                    time.sleep(0.01)  # no worker is in this step any more
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
            is_back = job.elastic.num_changes == 1 if sys.argv[2] == "replace" else changes == 2
            steps_back += job.env.is_newcomer or is_back
            if steps_back == 5:
                break
    torch.accelerator.synchronize()
assert not laggard.take_races()
"""


@pytest.mark.parametrize(
    ("mesh", "on_loss", "order"),
    [
        ("dp=2,pp=2", "replace", "lazy"),
        ("dp=2,fsdp=2", "shrink", "1"),
        pytest.param("dp=2,tp=2", "replace", "1", marks=pytest.mark.slow),
    ],
)
def test_a_unit_on_devices_is_replaced(tmp_path: Path, mesh: str, on_loss: str, order: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "runtime").mkdir(mode=0o700)
    command = [sys.executable, "-m", "paceline", "run", "--mesh", mesh, "--min", "2"]
    ended = subprocess.run(
        [*command, "--on-loss", on_loss, "--devices", "laggard:0,1,0,1"]
        + ["train.py", order, on_loss],
        cwd=tmp_path,
        env=device_path({**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "worker 2 of its unit is retired with it" in ended.stderr
    assert "1 loss (worker 3), 1 replaced" in ended.stderr, ended.stderr
    printed = defaultdict[tuple[int, int], dict[int, str]](dict)
    for words in re.findall(r"step (\d+) place (\d) unit (\d): (\w+) (\S+)", ended.stdout):
        printed[int(words[0]), int(words[1])][int(words[2])] = words[3]
        assert float(words[4]) < 10
    assert all(len(set(by_unit.values())) == 1 for by_unit in printed.values()), printed
    last = max(step for step, _ in printed)
    for place in (0, 1):  # no step is missing, and at the end both units are there
        assert [step for step, where in sorted(printed) if where == place] == [*range(1, last + 1)]
        assert set(printed[last, place]) == {0, 1}
