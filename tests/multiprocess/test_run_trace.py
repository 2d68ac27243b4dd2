"""`paceline run --trace`: a file of what every process did in some steps, on one clock."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from run_support import END_S, Workbench, wait_until

from support.trace_checks import Event, Trace

_TRAIN = """
    import pathlib, sys, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline as pl
    from paceline.runtime.job import current

    pl.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, optimizer, bucket_mb=0.01)
    count = 4 * int(sys.argv[1])
    data = TensorDataset(torch.randn(count, 64), torch.randint(0, 2, (count,)))
    for x, y in pl.shard(DataLoader(data, batch_size=2)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        step = current().steps_done
        if pl.rank() == 0:
            pathlib.Path(f"at-{step}").touch()
        else:
            while not pathlib.Path(f"at-{step}").exists():
                time.sleep(0.002)
            time.sleep(float(sys.argv[2]))  # the others wait for this one
        loss.backward()
        optimizer.step()
        pathlib.Path(f"step-{pl.rank()}").write_text(f"{current().steps_done}\\n")
"""


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def _traced(bench: Workbench, *arguments: str) -> Trace:
    done = bench.run("run", "--log-dir", "kept", "--trace", "3:6", *arguments)
    assert done.returncode == 0, done.stderr
    assert "paceline: trace of steps 3 to 5, 2 ranks" in done.stderr, done.stderr
    assert "kept/trace.json (open in https://ui.perfetto.dev or chrome://tracing)" in done.stderr
    return Trace(bench.path / "kept" / "trace.json")


def _named(trace: Trace, process: str, name: str, row: str = "") -> list[Event]:
    return [span for span in trace.of(process, row) if span["name"] == name]


def test_two_workers_in_lockstep(bench: Workbench) -> None:
    trace = _traced(bench, "-n", "2", bench.script(_TRAIN), "8", "0.1")
    assert trace.processes == {0: "rank 0", 1: "rank 1"}
    for rank in ("rank 0", "rank 1"):
        assert trace.steps(rank) == [3, 4, 5]
        assert {"input", "compute", "wait", "optimizer"} <= trace.names(rank, "training")
        reduced = [s for s in trace.of(rank, "all_reduce") if s["name"] == "all_reduce bucket 0"]
        assert [s["args"]["step"] for s in reduced] == [3, 4, 5]
        assert all(s["args"]["bytes"] > 0 for s in reduced)
    assert {"bucket 0 ready", "bucket 1 ready"} <= {mark["name"] for mark in trace.marks}
    waits = [s for s in _named(trace, "rank 0", "wait") if s["args"].get("behind") == "all_reduce"]
    assert [s["args"]["for"] for s in waits] == ["rank 1"] * 3
    for wait in waits:  # it ends when the last one is there, whose clock is the same
        step = wait["args"]["step"]
        ready = max(m["ts"] for m in trace.marks if m["pid"] == 1 and m["args"]["step"] == step)
        assert wait["ts"] < ready <= wait["ts"] + wait["dur"]


@pytest.mark.parametrize("pace", ["ps", "ssp:1"])
def test_workers_and_a_server(bench: Workbench, pace: str) -> None:
    script = bench.script(_TRAIN)
    trace = _traced(bench, "-n", "2", "-s", "1", "--pace", pace, script, "10", "0.1")
    assert trace.processes[2] == "server 0"
    for number in (0, 1):
        assert trace.steps(f"rank {number}") == [3, 4, 5]
        assert len(_named(trace, f"rank {number}", "commit", "training")) == 3
        assert "push bucket 0" in trace.names(f"rank {number}", "push")
        commits = _named(trace, "server 0", f"apply commit worker {number}", "serving")
        assert [s["args"]["step"] for s in commits] == [3, 4, 5]
        pushes = _named(trace, "server 0", f"apply push worker {number}", "serving")
        assert pushes and all(s["args"]["bytes"] > 0 for s in pushes)
    waits = _named(trace, "server 0", "worker 0 waits", "waits")
    assert waits and {s["args"]["for"] for s in waits} == {"worker 1"}
    for mine in _named(trace, "rank 0", "commit"):  # the server applies it meanwhile
        there = next(
            s
            for s in _named(trace, "server 0", "apply commit worker 0")
            if s["args"]["step"] == mine["args"]["step"]
        )
        assert mine["ts"] <= there["ts"] <= mine["ts"] + mine["dur"]


_PIPELINE = """
    import torch
    import paceline as pl

    pl.init()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 16)
    model, optimizer = pl.distribute(
        model, optimizer, mesh="pp=2", loss=torch.nn.functional.mse_loss, example=x, microbatches=4
    )
    for _ in range(8):
        model.train_step(x, x)
"""


def test_stages_of_a_pipeline(bench: Workbench) -> None:
    trace = _traced(bench, "-n", "2", bench.script(_PIPELINE))
    for stage, rank in enumerate(("rank 0", "rank 1")):
        assert trace.steps(rank) == [3, 4, 5]
        for name in ("F0", "F3", "B1", "B2"):
            found = _named(trace, rank, name, "training")
            assert [s["args"]["step"] for s in found] == [3, 4, 5]
            assert {(s["args"]["stage"], s["args"]["microbatch"]) for s in found} == {
                (stage, int(name[1]))
            }
    for step in range(3):  # stage 1 has its input from stage 0
        first, second = (_named(trace, rank, "F0")[step] for rank in ("rank 0", "rank 1"))
        assert first["ts"] < second["ts"]
        first, second = (_named(trace, rank, "B1")[step] for rank in ("rank 0", "rank 1"))
        assert second["ts"] < first["ts"], "and gives it the gradient"
        assert len(_named(trace, "rank 0", "optimizer")) == 3


def test_a_job_that_ends_too_early_says_so(bench: Workbench) -> None:
    done = bench.run("run", "--log-dir", "kept", "--trace", "20:30", bench.script(_TRAIN), "4", "0")
    assert done.returncode == 0, done.stderr
    assert "paceline: no trace of steps 20 to 29: training ended at step 8" in done.stderr
    assert not (bench.path / "kept" / "trace.json").exists()


def test_after_an_interruption_there_is_what_there_was(bench: Workbench) -> None:
    script, here = bench.script(_TRAIN), bench.path / "step-0"
    with bench.started(
        *("run", "-n", "2", "--log-dir", "kept", "--trace", "2:9000", script, "9000", "0.1")
    ) as launcher:
        wait_until(lambda: here.exists() and int(here.read_text() or 0) > 25, within_s=END_S)
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=END_S)
    assert "; training ended before the end of steps 2 to 8999" in said, said
    steps = Trace(bench.path / "kept" / "trace.json").steps("rank 0")
    assert len(steps) > 5 and steps == list(range(2, 2 + len(steps)))


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (("--trace", "30:20"), "", "--trace 30:20: the range is empty; write --trace FIRST"),
        ((), "20-30", "PACELINE_TRACE '20-30': write PACELINE_TRACE FIRST:STOP"),
        (("--trace", "2:4", "--log-dir", "none"), "", "--trace 2:4 with --log-dir none: there is"),
        (("--trace", "2:4", "--env", "PACELINE_TRACE=3:4"), "", "give only one"),
    ],
)
def test_wrong_wishes_are_refused_before_anything_starts(
    bench: Workbench, arguments: tuple[str, ...], env: str, words: str
) -> None:
    script = bench.script("open('ran', 'w')")
    done = bench.run("run", *arguments, script, PACELINE_TRACE=env)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (bench.path / "ran").exists() and not (bench.path / "runs").exists()
