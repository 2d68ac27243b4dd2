"""`paceline plan` measures real scripts, and refuses those that cannot be planned."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.planner.profile import read_profile

HEAD = """
import torch, paceline as pl
pl.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
DISTRIBUTE = "model, optimizer = pl.distribute(model, optimizer)\n"
LOOP = """
data = torch.utils.data.TensorDataset(torch.randn({samples}, 64), torch.randn({samples}, 8))
for x, y in pl.shard(torch.utils.data.DataLoader(data, batch_size=16)):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
"""


def plan(tmp_path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "paceline", "plan", *words, "train.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


def test_a_script_is_measured_planned_and_run(tmp_path):
    script = HEAD + DISTRIBUTE + LOOP.format(samples=16 * 2 * 40)
    words = ["-n", "2", "--steps", "5", "--save-profile", "model.json", "--apply", "--all"]
    done = plan(tmp_path, script, *words)
    assert done.returncode == 0, done.stderr
    profile = read_profile(tmp_path / "model.json")
    # Linear 64 x 256 and 256 x 8 with biases, each tensor on cache lines of its own.
    assert profile.parameters_bytes == 4 * (64 * 256 + 256 + 256 * 8 + 16)
    assert profile.batch == 16 and profile.steps >= 5
    assert profile.backward_s > 0 and profile.optimizer_s > 0 and profile.forward_s > 0
    readies = [bucket.ready_s for bucket in profile.buckets]
    assert readies == sorted(readies) and readies[-1] <= profile.backward_s * 1.01
    for label in ("allreduce ", "ps, 1 server ", "async, colocated", "diloco:50 ", "fsdp=2"):
        assert label in done.stdout
    assert "servers: " in done.stdout and "recommended: paceline run -n 2" in done.stdout
    assert ": predicted " in done.stdout and ", measured " in done.stdout


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (HEAD + LOOP.format(samples=640), "never called pl.distribute"),
        (HEAD + DISTRIBUTE + LOOP.format(samples=32), "ended after 2 steps"),
        (HEAD + DISTRIBUTE, "took no optimizer step: it trains on nothing"),
        ("raise SystemExit('the data is gone')", "the data is gone"),
    ],
    ids=["no-distribute", "two-steps", "nothing", "fails"],
)
def test_scripts_that_cannot_be_planned(tmp_path, script, words):
    done = plan(tmp_path, script, "-n", "1")
    assert done.returncode == 2 and words in done.stderr


def test_wrong_options_are_explained(tmp_path):
    both = plan(tmp_path, HEAD, "-n", "2", "--hosts", "a:1")
    assert both.returncode == 2 and "give one of them" in both.stderr
    wish = plan(tmp_path, HEAD, "--cluster", "none.yaml", "--apply")
    assert wish.returncode == 2 and "--apply runs on this machine or with --hosts" in wish.stderr
    gone = plan(tmp_path, HEAD, "--cluster", "none.yaml")
    assert gone.returncode == 2 and "No such file" in gone.stderr
