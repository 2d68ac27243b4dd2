"""pace="auto" and --max-wire in real jobs on one host; tests/cluster has several hosts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from run_support import END_S, Workbench, wait_until

from paceline.errors import ConfigError, UsageError
from paceline.launcher.spec import RunSpec
from paceline.pace.parse import parse_schedule
from paceline.runtime.mesh import Mesh

_TRAIN = """
    import pathlib, time
    import torch
    import paceline as pl

    job = pl.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = pl.distribute(model, optimizer, pace="auto")
    last = 1 << 30
    while job.steps_done < last:
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pathlib.Path(f"step-{pl.rank()}").write_text(f"{job.steps_done}\\n")
        time.sleep(0.005)
        # All end after one step. Rank 0 names it so early that no worker is there yet.
        if pl.rank() == 0 and pathlib.Path("end").exists() and not pathlib.Path("last").exists():
            pathlib.Path("new").write_text(f"{job.steps_done + 20}")
            pathlib.Path("new").rename("last")
        if last == 1 << 30 and pathlib.Path("last").exists():
            last = int(pathlib.Path("last").read_text())
    print("sum", sum(p.detach().double().sum().item() for p in model.parameters()), flush=True)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def _step(bench: Workbench) -> int:
    return int(bench.wait_for_files("step-0")[0])


def _reach(bench: Workbench, step: int) -> None:
    wait_until(lambda: _step(bench) > step, within_s=60)


def _set(bench: Workbench, pace: str) -> None:
    done = bench.run("set", f"pace={pace}")
    assert done.returncode == 0, done.stderr
    found = re.search(r"after step (\d+)", done.stdout)
    assert found is not None, done.stdout
    _reach(bench, int(found[1]))


def _finish(bench: Workbench, launcher: subprocess.Popen[str]) -> str:
    (bench.path / "end").touch()
    output, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 0, errors
    return str(output + errors)


def _lines(output: str) -> list[str]:
    return re.findall(r"paceline: auto: (.*)", output)


@pytest.mark.timeout(240)  # several commands one after the other, each imports much
def test_a_choice_is_made_overridden_and_made_again(bench: Workbench) -> None:
    """An elastic job: a worker that joins later meets the others too."""
    script = bench.script(_TRAIN)
    words = ["run", "-n", "2", "--min", "1", "--max", "3", script]
    with bench.started(*words) as launcher:
        _reach(bench, 40)
        assert bench.run("scale", "-n", "3").returncode == 0
        (bench.path / "step-2").touch()
        wait_until(lambda: (bench.path / "step-2").read_text() != "", within_s=60)
        _reach(bench, _step(bench) + 60)
        _set(bench, "local:4")
        refused = bench.run("set", "pace=auto[allow=local]")
        assert refused.returncode == 2 and "this job began with auto" in refused.stderr
        _set(bench, "auto")
        _reach(bench, _step(bench) + 10)
        output = _finish(bench, launcher)
    lines = _lines(output)
    # On one host without servers there is one candidate: allreduce.
    assert len(lines) == 5, lines
    assert re.match(r"allreduce: predicted [\d.]+ \w+ per step \(", lines[0]), lines
    assert lines[1].startswith("exact: equals one process"), lines
    expected = "3 workers on 1 host instead of 2 on 1 host, but still: allreduce: predicted"
    assert lines[2].startswith(expected), lines
    assert lines[3].startswith("allreduce: predicted ") and lines[4] == lines[1], lines
    assert re.search(r"pace local:4 instead of allreduce", output)
    assert re.search(r"pace allreduce instead of local:4", output)
    assert len(set(re.findall(r"sum (\S+)", output))) == 1, "all have the same model in the end"


def test_contradictions_and_short_scripts_are_reported(bench: Workbench) -> None:
    script = bench.script("""
        import sys, torch
        import paceline as pl
        pl.init()
        def both():
            model = torch.nn.Linear(4, 2)
            return model, torch.optim.SGD(model.parameters(), lr=0.01)
        if sys.argv[1] == "nothing":
            raise SystemExit(0)
        for options in ({"compress": "int8"}, {"outer": 1}):
            try:
                pl.distribute(*both(), pace="auto", **options)
            except pl.errors.UsageError as error:
                print("refused:", error, flush=True)
        model, optimizer = pl.distribute(*both(), pace="auto")
        for _ in range(3):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
    """)
    done = bench.run("run", "-n", "2", script, "some")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "compress=int8 contradicts pace auto, which chooses the codec" in output
    assert "no pace that can be chosen has an option 'outer'" in output
    assert "nothing was chosen, because the script took fewer than 8 steps" in output
    done = bench.run("run", "-n", "1", "--pace", "auto", script, "nothing")
    assert "--pace auto had no effect: the script never called pl.distribute" in done.stderr


@pytest.mark.parametrize(
    ("pace", "max_wire", "mesh", "words"),
    [
        (None, "0mbit", None, "nothing can be sent at that rate"),
        (None, "quick", None, "expected a number and a unit"),
        (None, "200", None, "expected a number and a unit"),
        ("gossip:ring", "1mbit", None, "cannot be planned"),
        ("ps@0, local:8@9", "1mbit", None, "a budget fits one pace"),
        (None, "1mbit", "tp=2", "--max-wire and --mesh"),
        ("auto", None, "pp=2", "--pace auto and --mesh"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_the_start(
    tmp_path: Path, pace: str | None, max_wire: str | None, mesh: str | None, words: str
) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises((ConfigError, UsageError), match=words):
        RunSpec(
            target=str(tmp_path / "train.py"),
            num_workers=2,
            pace=None if pace is None else parse_schedule(pace),
            max_wire=max_wire,
            mesh=None if mesh is None else Mesh.parse(mesh),
        )
