"""SIGTERM where the script has a pl.Checkpoint: all save behind the same step, exit code 75."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from run_support import END_S, Workbench, read_until


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


_SCRIPT = """
    import json, os, sys, time
    import torch
    from torch.utils.data import DataLoader
    import paceline as pl

    pl.init()
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = pl.distribute(model, optimizer)
    loader = DataLoader(range(400), batch_size=2, shuffle=True)
    checkpoint = pl.Checkpoint("saved", every=1000)
    seen = []
    for epoch in pl.epochs(2):
        for batch in pl.shard(loader, epoch=epoch):
            seen += batch.tolist()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if checkpoint.steps == 3:
                open(f"pid-{pl.rank()}", "w").write(f"{os.getpid()}\\n")
            name = f"seen-{sys.argv[1]}-{pl.rank()}.json"
            json.dump([epoch, seen, checkpoint.steps], open(name, "w"))
            time.sleep(float(sys.argv[2]) if checkpoint.steps >= 3 else 0.02)
            checkpoint.step()
        seen = []
    open(f"done-{pl.rank()}", "w").write("yes\\n")
"""


def _epoch_and_seen(bench: Workbench, run: str, rank: int) -> tuple[int, list[int], int]:
    epoch, seen, steps = json.loads((bench.path / f"seen-{run}-{rank}.json").read_text())
    return epoch, seen, steps


@pytest.mark.parametrize(
    ("who", "options"),
    [("the launcher", ()), ("one worker", ()), ("one worker", ("-s", "1", "--pace", "ps"))],
)
def test_all_save_behind_one_step_and_nothing_is_lost(
    bench: Workbench, who: str, options: tuple[str, ...]
) -> None:
    script = bench.script(_SCRIPT)
    with bench.started("run", "-n", "2", *options, script, "first", "0.1") as launcher:
        _, pid = bench.wait_for_files("pid-0", "pid-1")
        if who == "the launcher":
            launcher.send_signal(signal.SIGTERM)
        else:
            os.kill(int(pid), signal.SIGTERM)
        _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 75, errors
    assert "saved and stopped" in errors and "Traceback" not in errors
    (path,) = (bench.path / "saved").glob("step-*")
    stopped = [_epoch_and_seen(bench, "first", rank) for rank in range(2)]
    assert [steps for _, _, steps in stopped] == [int(path.name.removeprefix("step-"))] * 2
    done = bench.run("run", "-n", "2", *options, script, "second", "0")
    assert done.returncode == 0, done.stderr
    assert f"resumes from saved/{path.name}" in done.stderr
    # The epoch that was interrupted is the first of 2: what it had seen, and the whole second.
    assert all(epoch == 0 for epoch, _, _ in stopped)
    ends = [_epoch_and_seen(bench, "second", rank) for rank in range(2)]
    assert [(epoch, steps) for epoch, _, steps in ends] == [(1, 200), (1, 200)]
    assert sorted(ends[0][1] + ends[1][1]) == list(range(400))
    assert bench.left_behind() == []


def test_the_second_sigterm_does_not_wait_for_a_save(bench: Workbench) -> None:
    with bench.started("run", "-n", "2", bench.script(_SCRIPT), "slow", "100") as launcher:
        bench.wait_for_files("pid-0", "pid-1")
        launcher.send_signal(signal.SIGTERM)
        read_until(
            launcher.stderr, "interrupt again to end them at once"
        )  # two at once would be one
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 143
    assert "did not end on SIGTERM" not in errors, "it waited for a save, until the 30 s were over"
    assert not list((bench.path / "saved").glob("step-*")) and bench.left_behind() == []


def test_a_resumed_job_counts_each_sample_of_the_epoch_once(bench: Workbench) -> None:
    """With another number of workers, in the middle of an epoch."""
    script = bench.script(
        _SCRIPT.replace("every=1000", "every=7").replace("epochs(2)", "epochs(1)")
    )
    with bench.started("run", "-n", "2", script, "first", "0.1") as launcher:
        bench.wait_for_files("pid-0", "pid-1")
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=END_S)
    before = [_epoch_and_seen(bench, "first", rank)[1] for rank in range(2)]
    done = bench.run("run", "-n", "3", script, "second", "0")
    assert done.returncode == 0, done.stderr
    after = [_epoch_and_seen(bench, "second", rank)[1] for rank in range(3)]
    assert "3 workers instead of 2" in done.stderr
    seen = sorted(sample for part in [*before, *after] for sample in part)
    # The last global batch of 4 has nothing for one of 3 workers, or repeats a sample for it.
    assert sorted(set(seen)) == list(range(400))
    assert len(seen) - 400 <= 2
