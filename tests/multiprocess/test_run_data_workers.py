"""`paceline run --data-workers`: started, named, watched and missed by the same command."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from run_support import END_S, Workbench, is_alive, read_until
from torch.utils.data import DataLoader

import paceline as pl
from paceline.launcher.function.launch import launch
from paceline.runtime import job


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


# Counts its samples; halts after a few batches until a file appears, if it is told to.
_TRAIN = """
    import os, pathlib, sys, time
    import torch
    from torch.utils.data import DataLoader
    import paceline as pl

    pl.init()
    model = torch.nn.Linear(1, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    train = pl.shard(DataLoader(torch.arange(120.0)[:, None], 4, shuffle=True), mode="pipeline")
    print("begins with", len(train), "batches of", pl.world_size())
    if pl.is_data_worker():
        name = "data-" + os.environ["PACELINE_RANK"]
        pathlib.Path(name).write_text(f"{os.getpid()}\\n")
    seen = []
    for x in train:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        seen += x.flatten().tolist()
        if len(sys.argv) > 1 and len(seen) == 12:
            pathlib.Path(f"halts-{pl.rank()}").write_text("yes\\n")
            while not pathlib.Path("go").exists(): time.sleep(0.01)
    print("saw", len(set(seen)), "of", len(seen))
"""


def test_data_workers_are_part_of_the_job(bench: Workbench) -> None:
    options = ("-n", "1", "--data-workers", "2", "--log-dir", "logs")
    done = bench.run("run", *options, bench.script(_TRAIN))
    assert done.returncode == 0, done.stderr
    begins = [f"[{label}] begins with 30 batches of 1" for label in ("0", "d0", "d1")]
    assert sorted(done.stdout.splitlines()) == sorted([*begins, "[0] saw 120 of 120"])
    assert re.search(r"paceline: 1 rank and 2 data workers finished in \d+\.\d s\n", done.stderr)
    assert "[d0] paceline: data workers (2) make the batches of: Tensor of 120" in done.stderr
    assert "lost" not in done.stderr and "the job continues" not in done.stderr
    logs = {path.name for path in (bench.path / "logs").iterdir()}
    assert logs >= {"rank-0.log", "data-worker-0.log", "data-worker-1.log"}
    assert bench.left_behind() == []


def test_the_job_goes_on_without_a_data_worker(bench: Workbench) -> None:
    options = ("run", "-n", "1", "--data-workers", "2")
    with bench.started(*options, bench.script(_TRAIN), "halt") as launcher:
        pids = bench.wait_for_files("data-0", "data-1")
        bench.wait_for_files("halts-0")
        os.kill(int(pids[1]), signal.SIGKILL)
        ended = (
            "data worker 1: killed by SIGKILL (killed); the job continues with 1 of 2 data workers"
        )
        errors = read_until(launcher.stderr, ended)
        (bench.path / "go").touch()
        output, rest = launcher.stdout.read(), launcher.stderr.read()  # type: ignore[union-attr]
        errors += rest
        assert launcher.wait(END_S) == 0, errors
    assert "[0] saw 120 of 120\n" in output
    assert re.search(r"\[0\] paceline: rank 0: data worker 1 \(.*\) is lost: 1 left", errors)
    assert not any(map(is_alive, pids)) and bench.left_behind() == []


def test_nobody_waits_for_a_data_worker_that_does_not_come_to_its_loop(bench: Workbench) -> None:
    script = bench.script("""
        import time
        from torch.utils.data import DataLoader
        import paceline as pl
        pl.init()
        made = pl.shard(DataLoader(range(100), 5), mode="pipeline")
        if pl.rank() == 2:
            time.sleep(60)
        print("saw", sum(len(batch) for batch in made))
    """)
    done = bench.run("run", "-n", "1", "--data-workers", "2", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] saw 100\n" and bench.left_behind() == []


def test_a_data_worker_that_fails_before_all_have_joined_is_the_first_cause(
    bench: Workbench,
) -> None:
    script = bench.script("""
        import os
        if os.environ["PACELINE_ROLE"] == "data":
            raise FileNotFoundError("no pictures here")
        import paceline as pl
        pl.init()
    """)
    done = bench.run("run", "-n", "1", "--data-workers", "1", script)
    assert done.returncode == 1
    assert "paceline: data worker 0 failed first: exit code 1" in done.stderr
    assert "no pictures here" in done.stderr and bench.left_behind() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data-workers", "many"], "--data-workers many: expected a number"),
        (["--data-workers", "2,0"], "--data-workers 2,0: expected at least 1 for each stage"),
        (["--data-workers", "2000"], "--data-workers 2000: expected at least 1"),
        (["-n", "2", "--min", "1", "--data-workers", "1"], "--data-workers in an elastic job"),
        (["--env", "PACELINE_DATA_WORKERS=1"], "the launcher sets PACELINE_DATA_WORKERS"),
    ],
)
def test_a_wrong_number_of_data_workers_gets_one_line_and_code_2(
    bench: Workbench, options: list[str], words: str
) -> None:
    done = bench.run("run", *options, bench.script("raise SystemExit('must not run')"))
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.startswith("paceline: error: ")
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_dry_run_shows_data_workers(bench: Workbench) -> None:
    script = bench.script("raise SystemExit('must not run')")
    options = ("-n", "2", "-s", "1", "--data-workers", "2,1", "--log-dir", "logs")
    done = bench.run("run", *options, "--dry-run", script, "x")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    labels = [line.split()[0] for line in lines if line.endswith(f" {script} x")]
    assert labels == ["[0]", "[1]", "[d0]", "[d1]", "[d2]"]
    assert {"[d2]     PACELINE_ROLE=data", "[d2]     PACELINE_RANK=2"} <= set(lines)
    assert {"[d2]     RANK=5", "[0]     PACELINE_DATA_WORKERS=2,1"} <= set(lines)
    assert lines[-1].endswith("and data-worker-0.log to data-worker-2.log")


def _sum_of_samples(victim: int) -> float:
    pl.init()
    made = pl.shard(DataLoader(range(100), 5), mode="pipeline")
    total = 0.0
    for number, batch in enumerate(made):
        if number == 2 and victim >= 0:
            members = job.current().fabric.membership
            os.kill(members.member(members.data_workers[victim]).pid, signal.SIGKILL)
        total += float(batch.sum())
    return total


@pytest.mark.parametrize("victim", [-1, 0])
def test_a_launched_function_has_data_workers(victim: int) -> None:
    assert launch(_sum_of_samples, victim, workers=1, data_workers=[1, 1], timeout_s=60) == [4950]


@pytest.mark.timeout(240)  # two runs
def test_python_of_the_guide_is_one_script_with_data_workers_or_without(bench: Workbench) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "data-workers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 2
    script = bench.script("".join(blocks))
    for options in (["--data-workers", "1,1"], []):
        done = bench.run("run", *options, script)
        assert done.returncode == 0, done.stderr
        assert "[0] rank 0 evaluated 256 samples\n" in done.stdout
        assert ("without data workers" in done.stderr) == (not options)


_SAVING = """
    import sys
    import torch
    from torch.utils.data import DataLoader, Dataset
    import paceline as pl

    class Noisy(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.tensor([float(index), torch.rand(()).item()])

    pl.init()
    torch.manual_seed(7)
    model = torch.nn.Linear(2, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    checkpoint = pl.Checkpoint("saved", every=4)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    for batch in pl.shard(loader, seed=3, mode="pipeline"):
        if checkpoint.steps >= 4:
            print(pl.rank(), checkpoint.steps, batch.tolist(), flush=True)
        model(batch).sum().backward()
        optimizer.step()
        checkpoint.step()
        if checkpoint.steps == int(sys.argv[1]):
            break
    checkpoint.wait()
"""


@pytest.mark.timeout(240)  # two runs
def test_a_checkpoint_goes_on_with_other_data_workers(bench: Workbench) -> None:
    script = bench.script(_SAVING)
    whole = bench.run("run", "-n", "2", "--data-workers", "1", script, "7")
    assert whole.returncode == 0, whole.stderr
    resumed = bench.run("run", "-n", "2", "--data-workers", "2", script, "7")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes from saved/step-000000004" in resumed.stderr
    found = sorted(resumed.stdout.splitlines())
    assert len(found) == 6 and found == sorted(whole.stdout.splitlines())
