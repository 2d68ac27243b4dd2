"""`paceline set pace=...`: another pace for a job that runs, under the real launcher."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from run_support import END_S, Workbench, wait_until

_TRAIN = """
    import pathlib, sys, time
    import torch
    import paceline as pl

    job = pl.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = pl.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    while True:
        model(torch.ones(2, 4) * (1 + pl.rank())).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        pathlib.Path(f"step-{pl.rank()}").write_text(f"{job.steps_done}\\n")
        time.sleep(0.01 * (1 + pl.rank()))  # free-running workers go apart
        # All end behind one step. Rank 0 names it so early that nobody is there yet.
        if pl.rank() == 0 and pathlib.Path("end").exists() and not pathlib.Path("last").exists():
            pathlib.Path("new").write_text(f"{job.steps_done + 20}")
            pathlib.Path("new").rename("last")
        if pathlib.Path("last").exists() and job.steps_done >= int(
            pathlib.Path("last").read_text()
        ):
            break
    with model.agreed():
        print("sum", sum(p.double().sum().item() for p in model.parameters()), flush=True)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def _step(bench: Workbench, rank: int) -> int:
    return int(bench.wait_for_files(f"step-{rank}")[0])


def _finish(bench: Workbench, launcher: subprocess.Popen[str]) -> str:
    """Let all workers end behind the same step; return what was printed."""
    (bench.path / "end").touch()
    output, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 0, errors
    return str(output + errors)


def _set(bench: Workbench, pace: str) -> int:
    """Set the pace; return the step behind which it changes."""
    done = bench.run("set", f"pace={pace}")
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(rf"job script-\w+: pace {re.escape(pace)} after step (\d+)\n", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


def _reach(bench: Workbench, step: int) -> None:
    wait_until(lambda: min(_step(bench, 0), _step(bench, 1)) > step, within_s=60)


@pytest.mark.timeout(240)  # many commands one after the other, each imports much
def test_a_running_job_takes_one_pace_after_the_other(bench: Workbench) -> None:
    script = bench.script(_TRAIN)
    with bench.started("run", "-n", "2", "-s", "1", "--pace", "ps", script) as launcher:
        _reach(bench, 3)
        paces = ["ssp:2", "local:4", "async", "diloco:5", "allreduce"]
        for pace in paces:
            _reach(bench, _set(bench, pace))
        refused = bench.run("set", "pace=allredcue")
        assert refused.returncode == 2 and "did you mean allreduce" in refused.stderr
        refused = bench.run("set", "pace=allreduce@0, ps@3")
        assert refused.returncode == 2 and "one pace at a time" in refused.stderr
        refused = bench.run("set", "speed=9")
        assert refused.returncode == 2 and "pace=local:8" in refused.stderr
        output = _finish(bench, launcher)
    for before, after in zip(["ps", *paces], paces, strict=False):
        assert re.search(rf"after step \d+: pace {after} instead of {before}", output), output
    assert len(set(re.findall(r"sum (\S+)", output))) == 1, "both have the same model in the end"


def test_what_cannot_be_is_refused_and_training_goes_on(bench: Workbench) -> None:
    script = bench.script(_TRAIN)
    with bench.started("run", "-n", "2", script) as launcher:
        _reach(bench, 3)
        refused = bench.run("set", "pace=ps")
        assert refused.returncode == 2, refused
        assert "needs parameter servers, and this job has none" in refused.stderr
        _reach(bench, max(_step(bench, 0), _step(bench, 1)) + 5)
        _reach(bench, _set(bench, "local:4"))
        assert "instead of allreduce" in _finish(bench, launcher)
    none = bench.run("set", "pace=local:4")
    assert none.returncode == 1 and "no job of yours runs" in none.stderr
