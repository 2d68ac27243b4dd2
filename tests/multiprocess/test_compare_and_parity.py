"""`paceline compare` and `paceline parity` on real scripts, also on those they must refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

# It reports no loss, and takes what differs between the runs of a test from its argument.
SCRIPT = """
import sys, torch, paceline as pl
pl.init()
kind = sys.argv[1] if len(sys.argv) > 1 else ""
torch.manual_seed(0)
x = torch.randn(2048, 16)
y = (x[:, :8].sum(1) > 0).long()
middle = [torch.nn.Dropout(0.5)] if kind == "dropout" else []
first, last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 2)
model = torch.nn.Sequential(first, torch.nn.ReLU(), *middle, last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if kind != "plain":
    model, optimizer = pl.distribute(model, optimizer)
measure = torch.nn.CrossEntropyLoss(reduction="sum" if kind == "sum" else "mean")
length = 64 if kind == "short" else 2048  # two steps of two workers
data = torch.utils.data.TensorDataset(x[:length], y[:length])
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
for epoch in range(0 if kind == "nothing" else 1 if kind in ("short", "plain") else 10000):
    for a, b in pl.shard(loader, epoch=epoch):
        optimizer.zero_grad()
        measure(model(a), b).backward()
        optimizer.step()
"""


def paceline(tmp_path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


def test_parity_of_workers_and_one_process(tmp_path):
    done = paceline(tmp_path, "parity", "train.py", "-n", "3", "--pace", "ps", "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 workers at ps against one process with the global batch of 48 samples" in done.stdout
    assert len(re.findall(r"^[1-4] ", done.stdout, re.MULTILINE)) == 4
    assert "equal within 0.0001" in done.stdout


@pytest.mark.parametrize(
    ("kind", "first", "cause"),
    [
        ("dropout", "step 1: gradient 0.weight differs by 0.", "dropout seeds: the model has 1"),
        (
            "sum",
            "step 1: the loss differs: ",
            "loss not a mean: one process has 2.00 times the loss",
        ),
    ],
)
def test_parity_names_what_differs_first_and_why(tmp_path, kind, first, cause):
    done = paceline(tmp_path, "parity", "-n", "2", "--steps", "3", "train.py", kind)
    assert done.returncode == 1, done.stdout + done.stderr
    assert first in done.stdout and cause in done.stdout, done.stdout
    assert "ulp)" in done.stdout


def test_compare_runs_each_pace_with_the_same_number_of_steps(tmp_path):
    words = ["--paces", "allreduce,ssp:3", "--steps", "40", "--slow", "1:6x", "-o", "out"]
    done = paceline(tmp_path, "compare", "-n", "2", *words, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the value on which the script calls backward()" in done.stdout
    figure = (tmp_path / "out" / "compare.svg").read_text()
    page = (tmp_path / "out" / "compare.html").read_text()
    for title in ("Loss over time", "Loss over samples", "Throughput (samples/s)", "Sent by a"):
        assert title in figure and title in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    rows = re.findall(r"<tr><td>([^<]*)</td>(.*?)</tr>", page)
    cells = {name: re.findall(r'"num">([^<]*)<', row) for name, row in rows}
    assert list(cells) == ["allreduce", "ssp:3, 1 server"]
    assert all(0 < float(row[0]) < 0.65 for row in cells.values()), cells  # ln 2 is chance
    assert "paceline run -n 2 -s 1 --pace ssp:3 train.py" in page and "<script" not in page
    # Rank 0 waits for the slow rank 1: two workers, so about half of 5/6 of the time.
    assert int(cells["allreduce"][5].removesuffix(" %")) > 25


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root is sure to make namespaces")


@pytest.mark.parametrize(
    "route", [pytest.param("namespaces", marks=[pytest.mark.root, needs_root]), "pacing"]
)
def test_compare_on_a_slow_link(tmp_path, route):
    words = ["--paces", "allreduce,diloco:10", "--steps", "20", "--link", "2mbit"]
    done = paceline(tmp_path, "compare", "-n", "2", *words, "--emulate", route, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"links are emulated by {'network namespaces' if route == 'namespaces' else 'pacing'}"
    assert said in done.stdout and said in (tmp_path / "compare.html").read_text()
    assert (f"{said} in the engine: 2 hosts" in done.stderr) == (route == "pacing")
    speed = [float(n) for n in re.findall(r"(?:ms|s) +[\d.]+ +([\d.]+) +[\d.]+ k?B", done.stdout)]
    # A worker sends 2.5 kB in a step. After a first burst of 16 kB the rest of 20 steps takes at
    # least 0.13 s at 2 Mbit/s, so no worker can do more than 150 steps/s.
    assert len(speed) == 2 and speed[0] < 150 and speed[0] < speed[1], done.stdout


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("compare", "plain", "never called pl.distribute"),
        ("compare", "nothing", "took no optimizer step: it trains on nothing"),
        ("parity", "short", "ended after 2 steps; 3 are needed"),
    ],
)
def test_scripts_that_cannot_be_measured(tmp_path, command, kind, words):
    done = paceline(tmp_path, command, "-n", "2", "train.py", kind)
    assert done.returncode == 2 and words in done.stderr, done.stdout + done.stderr
