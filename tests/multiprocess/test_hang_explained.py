"""A hang explains itself: the launcher names the one that is missing and shows where it is.

The scripts get stuck in several ways, one after the other, each time in one process and in a
function `stuck(N)`, until the test has read the explanation and lets them go on. In the end the job
has ended well, and nothing was explained twice.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from run_support import Workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    bench = Workbench(tmp_path)
    # Longer than a process may have to wait for a core: that would be explained, too.
    settings = {"WARN_S": "0.3", "STACKS_AFTER_S": "3", "LIVENESS_S": "60"}
    bench.environ |= {f"PACELINE_{name}": value for name, value in settings.items()}
    return bench


_BEGIN = """
import os, signal, time

def stuck(number):
    while not os.path.exists(f"go-{number}"):
        time.sleep(0.05)
"""
_START = "it in the start of the job"


class Watched:
    """A job that gets stuck; its explanations come one after the other."""

    def __init__(self, bench: Workbench, launcher: subprocess.Popen[str]) -> None:
        self._bench, self._launcher = bench, launcher
        self.said = ""
        self._read = 0
        self._count = 0

    def explanation(self, *, of_start: bool = False) -> str:
        """Return the next one, its stacks included. A slow start may be explained at any time."""
        assert self._launcher.stderr is not None
        for line in self._launcher.stderr:
            self.said += line
            new = self.said[self._read :]
            if _START in line and not of_start:
                self._read = len(self.said)
            elif "missing: " in new or "do not match" in new:
                wanted = new.count("its stacks follow")
                if new.count("in <module>\n") >= wanted:
                    self._read = len(self.said)
                    self._count += not of_start
                    return new
        raise AssertionError("nothing was explained: " + self.said[self._read :])

    def go_on(self, number: int) -> None:
        (self._bench.path / f"go-{number}").write_text("")

    def finish(self) -> None:
        self.said += self._launcher.communicate(timeout=60)[1]
        lines = [line for line in self.said.splitlines() if "missing: " in line]
        assert len([line for line in lines if _START not in line]) == self._count, self.said
        assert self._launcher.returncode == 0, self.said


def frames(explanation: str, label: str = r"\d+") -> list[str]:
    """The functions of the script in which a process said that it is, innermost first."""
    return re.findall(rf'^\[{label}\]   File ".*script.py", line \d+ in (\S+)$', explanation, re.M)


_WORKERS = """
import torch
import paceline as pl
pl.init()
world, rank = pl.world(), pl.rank()
if rank == 1:
    stuck(1)
world.all_reduce(torch.ones(4))

if rank == 2:
    stuck(2)
    world.send(torch.ones(3), 1)
elif rank == 1:
    world.recv(torch.ones(3), 2)
    world.send(torch.ones(3), 0)
else:
    world.recv(torch.ones(3), 1)
world.barrier()

if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
world.barrier()

class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if rank == 0 and index >= 4:
            stuck(3)
        return torch.ones(3)

def prepared(pace):
    model = torch.nn.Linear(3, 1)
    return pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), pace=pace)

model, optimizer = prepared("allreduce")
for x in pl.shard(torch.utils.data.DataLoader(Dataset(), 2)):
    model(x).sum().backward()
    optimizer.step()

model, optimizer = prepared("ssp:1")
for step in range(4):
    if pl.rank() == 1 and step == 1:
        stuck(4)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_workers(bench: Workbench) -> None:
    """In a collective, in a chain of messages, stopped, in a data loader, and with a server."""
    with bench.started("run", "-n", "3", "-s", "1", bench.script(_BEGIN + _WORKERS)) as launcher:
        watched = Watched(bench, launcher)
        said = watched.explanation()
        words = (
            r"^paceline: rank 1 is missing: rank [02] has waited \d+ s for it in all_reduce #1 sum"
            r" float32\[4\]; it (sleeps|runs).*, pid \d+; its stacks follow$"
        )
        assert re.search(words, said, re.M), said
        assert frames(said, "1") == frames(said) == ["stuck", "<module>"], said
        assert "loop_thread.py" not in said and "futures/thread.py" not in said, "only what matters"
        watched.go_on(1)

        said = watched.explanation()
        words = (
            r"rank 2 is missing: rank [01] has waited \d+ s for (rank 1 in receive of 3 float32"
            r" from rank 1 with tag 0, which waits for )?it in receive of 3 float32 from rank 2"
        )
        assert re.search(words, said), said
        assert frames(said) == frames(said, "2") == ["stuck", "<module>"], said
        watched.go_on(2)

        said = watched.explanation()
        assert re.search(r"rank 1 is missing: rank [02] .* for it in barrier", said), said
        found = re.search(r"it is stopped \(kill -CONT (\d+) resumes it\), pid \1$", said, re.M)
        assert found and "stacks" not in said, said
        os.kill(int(found[1]), signal.SIGCONT)

        said = watched.explanation()
        assert re.search(r"rank 0 is missing: rank [12] has waited", said), said
        assert frames(said, "0")[:2] == ["stuck", "__getitem__"], said
        watched.go_on(3)

        said = watched.explanation()
        words = (
            r"rank 1 is missing: rank [02] has waited \d+ s for it in table '.*' at server 0; it"
        )
        assert re.search(words, said), said
        assert frames(said) == frames(said, "1") == ["stuck", "<module>"], said
        watched.go_on(4)
        watched.finish()


_PIPELINED = """
import torch
import paceline as pl

class Block(torch.nn.Linear):
    def forward(self, x):
        if is_training and self.name == "last":
            stuck(1)
        return super().forward(x)

pl.init()
is_training = False
blocks = [Block(8, 8) for _ in range(2)]
blocks[0].name, blocks[1].name = "first", "last"
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(4, 8)
model, optimizer = pl.distribute(
    model, optimizer, mesh="pp=2", loss=torch.nn.functional.mse_loss, example=x, microbatches=2
)
is_training = True
model.train_step(x, x)
"""


@pytest.mark.slow  # a stage waits as in test_workers: for a message
def test_a_stage_of_a_pipeline(bench: Workbench) -> None:
    with bench.started("run", "-n", "2", bench.script(_BEGIN + _PIPELINED)) as launcher:
        watched = Watched(bench, launcher)
        said = watched.explanation()
        assert re.search(r"rank 1 is missing: rank 0 .* receive of", said), said
        assert frames(said, "1")[:2] == ["stuck", "forward"], said
        watched.go_on(1)
        watched.finish()


# The data worker comes late, too.
_DATA_WORKER = """
if os.environ["PACELINE_ROLE"] == "data":
    stuck(1)

import torch
from torch.utils.data import DataLoader
import paceline as pl

class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        stuck(2)
        return torch.ones(3)

pl.init()
model = torch.nn.Linear(3, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x in pl.shard(DataLoader(Dataset(), 2), mode="pipeline"):
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_data_worker(bench: Workbench) -> None:
    """It has not come to pl.init() at first, and is stuck in the dataset later."""
    options = ("-n", "1", "--data-workers", "1")
    with bench.started("run", *options, bench.script(_BEGIN + _DATA_WORKER)) as launcher:
        watched = Watched(bench, launcher)
        said = watched.explanation(of_start=True)
        words = rf"data worker 0 is missing: rank 0 has waited \d+ s for {_START}; it"
        assert re.search(words + ".*it has not called pl.init", said), said
        watched.go_on(1)
        said = watched.explanation()
        words = r"data worker 0 is missing: rank 0 has waited \d+ s for it in the next batch; it"
        assert re.search(words, said), said
        assert frames(said, "d0")[:2] == ["stuck", "__getitem__"], said
        watched.go_on(2)
        watched.finish()


def test_waits_that_end_in_time_and_operations_that_do_not_fit(bench: Workbench) -> None:
    """Short waits do not add up; then both ranks wait for each other, and none is missing."""
    bench.environ["PACELINE_STACKS_AFTER_S"] = "4"  # less than they are in sum
    script = """
    import torch
    import paceline as pl

    pl.init()
    for step in range(7):
        if pl.rank() == 1:
            time.sleep(0.8)
        pl.world().all_reduce(torch.ones(4))
    print("in time", flush=True)
    one, other = pl.new_group([0, 1]), pl.new_group([0, 1])
    (one if pl.rank() == 0 else other).all_reduce(torch.ones(4))
    """
    script = bench.script(_BEGIN + textwrap.dedent(script))
    with bench.started("run", "-n", "2", script) as launcher:
        watched = Watched(bench, launcher)
        said = watched.explanation()
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=60)
    assert re.search(r"all_reduce #\d sum float32\[4\] has waited \d s for rank 1", watched.said)
    words = r"deadlock: rank [01] has waited .*: these operations do not match"
    assert re.search(words, said), said
    assert frames(said, "0") == frames(said, "1") == ["<module>"], said
    assert "missing: " not in watched.said.replace(_START, ""), watched.said
