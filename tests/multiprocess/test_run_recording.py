"""What `paceline run` keeps of a run, where, and what becomes of the run when it cannot."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from run_support import Workbench, wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.observe.telemetry.events import MemberLost, Note, ProgressReport, RunEnded, RunStarted
from paceline.observe.telemetry.file_formats import EventReader


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    bench = Workbench(tmp_path)
    bench.environ.pop("PACELINE_LOG_DIR")
    return bench


# The control plane without the engine, so that no rank has to import torch.
_REPORTING = """
    import os, pathlib, sys, time
    from paceline.control.client.agent import Agent
    from paceline.control.transport.auth import load_secret
    from paceline.runtime.config import job_env
    from paceline.observe.telemetry import clock
    from paceline.observe.telemetry.events import Note, ProgressReport
    from paceline.observe.telemetry.step_times import StepTimes
    from paceline.observe.telemetry.traffic import Traffic

    env = job_env()
    secret = load_secret(env.secret_file)
    agent = Agent.connect(env.coordinator, secret, env.job_id, env.rank, "worker")
    print("hello from", env.rank, flush=True)
    step = 0
    while step < 20 or len(sys.argv) > 1 and not pathlib.Path(sys.argv[1]).exists():
        step += 1
        if step == 20:  # so that each has told of most steps before anybody's last
            agent.store_add("are near", 1)
            while int(agent.store_get("are near", 60)) < env.world_size:
                time.sleep(0.01)
        times = StepTimes(step, clock.now_s(), 0.02, 0.004, 0.01 if env.rank == 0 else 0.0, 8)
        values = {"loss": 1 / step, "<script>": 0.5, "bad": float("nan")}
        agent.report(
            ProgressReport(
                env.rank, step, values, 0.0, Traffic(step, 100 * step, 0), steps=(times,)
            )
        )
        time.sleep(0.02)
    agent.report(Note(env.rank, "a note"))
    agent.close()
"""


def _only_run(bench: Workbench) -> Path:
    (run,) = (bench.path / "runs").iterdir()
    return run


def _events(directory: Path) -> list:
    reading = EventReader(directory / "events.jsonl")
    events = [line.event for line in reading.lines()]
    assert reading.damaged == 0
    return events


def test_a_run_is_kept_by_itself(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_REPORTING, "train.py"), PACELINE_WARN_S="3")
    assert done.returncode == 0, done.stderr
    run = _only_run(bench)
    assert re.fullmatch(r"\d{8}-\d{6}-train-[0-9a-f]{4}", run.name)
    assert f"paceline: logs, events and TensorBoard files are in runs/{run.name}\n" in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("paceline: step")]
    assert sum("paceline: " in line for line in lines) < 10
    assert (run / "rank-1.log").read_text() == "hello from 1\n"

    settings = json.loads((run / "config.json").read_text())
    assert settings["workers"] == {"value": 2, "origin": "command line"}
    assert settings["warn_s"] == {"value": 3.0, "origin": "environment PACELINE_WARN_S"}
    assert settings["log_dir"] == {"value": f"runs/{run.name}", "origin": "default"}

    first, *events, last = _events(run)
    assert isinstance(first, RunStarted) and first.run == run.name and first.workers == 2
    assert isinstance(last, RunEnded) and last.exit_code == 0 and "2 ranks finished" in last.words
    told = [event for event in events if isinstance(event, ProgressReport)]
    assert sorted((e.rank, e.step) for e in told) == [(r, s) for r in (0, 1) for s in range(1, 21)]
    assert sorted(event.rank for event in events if isinstance(event, Note)) == [0, 1]
    assert not any(path.name.startswith("secret") for path in run.rglob("*"))

    board = EventAccumulator(str(run / "tb" / "worker-0"))
    board.Reload()
    assert board.Scalars("loss")[-1].step == 20
    assert board.Scalars("loss")[-1].value == pytest.approx(1 / 20)
    assert board.Scalars("time/wait share")[-1].value == pytest.approx(0.5)
    waits = [point.value for point in board.Scalars("waiting/for worker 1")]
    assert waits and 0 < min(waits) <= max(waits) <= 1, "how much when depends on who reports first"
    assert board.Scalars("throughput/samples per s")[-1].value == pytest.approx(400)
    assert {"_script_", "bad", "traffic/bytes per s"} <= set(board.Tags()["scalars"])
    assert sorted(path.name for path in (run / "tb").iterdir()) == ["job", "worker-0", "worker-1"]


def test_a_quiet_script_stays_quiet_and_is_kept(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script("print('x')"))
    assert (done.returncode, done.stderr) == (0, "")
    run = _only_run(bench)
    assert (run / "rank-0.log").read_text() == "x\n"
    assert [type(event) for event in _events(run)] == [RunStarted, RunEnded]
    assert not (run / "tb").exists()


def test_a_failure_names_the_log(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script("raise SystemExit(3)"))
    assert done.returncode == 3
    run = _only_run(bench)
    assert re.search(rf"runs/{run.name}/rank-[01]\.log", done.stderr), done.stderr
    assert _events(run)[-1].exit_code == 3


@pytest.mark.parametrize("way", ["option", "variable"])
def test_none_keeps_nothing(bench: Workbench, way: str) -> None:
    options = ["--log-dir", "none"] if way == "option" else []
    env = {} if way == "option" else {"PACELINE_LOG_DIR": "none"}
    done = bench.run("run", *options, bench.script(_REPORTING), **env)
    assert done.returncode == 0 and "are in" not in done.stderr
    assert sorted(path.name for path in bench.path.iterdir()) == ["runtime", "script.py"]


def test_a_named_directory_is_the_run(bench: Workbench) -> None:
    script = bench.script(_REPORTING)
    assert bench.run("run", script, PACELINE_LOG_DIR="by/variable").returncode == 0
    assert bench.run("run", "--log-dir", "kept", script, PACELINE_LOG_DIR="other").returncode == 0
    for name in ("by/variable", "kept"):
        assert {"config.json", "events.jsonl", "rank-0.log", "tb"} == {
            path.name for path in (bench.path / name).iterdir()
        }
    assert not (bench.path / "other").exists() and not (bench.path / "runs").exists()
    assert bench.run("run", "--log-dir", "kept", script).returncode == 0
    assert [type(e) for e in _events(bench.path / "kept")].count(RunStarted) == 1, "it begins anew"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--log-dir", "script.py"], "script.py cannot be written: File exists"),
        (["--log-dir", "script.py/x"], "script.py/x cannot be written: Not a directory"),
        ([], "runs/.* cannot be written: File exists"),
    ],
)
def test_training_goes_on_without_a_place_to_write(
    bench: Workbench, options: list[str], reason: str
) -> None:
    script = bench.script(_REPORTING)
    if not options:
        (bench.path / "runs").touch()
        reason = reason.replace("File exists", "(File exists|Not a directory)")
    done = bench.run("run", "-n", "2", *options, script)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(warnings) == 1 and re.match(f"paceline: {reason}; the job continues", warnings[0])
    assert "2 ranks finished" in done.stderr and "files are in" not in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]


def test_a_job_that_cannot_start_leaves_no_directory(bench: Workbench) -> None:
    assert bench.run("run", bench.script("pass"), PACELINE_PACE="x").returncode == 2
    assert not (bench.path / "runs").exists()


def test_dry_run_says_where_but_makes_nothing(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", "--dry-run", bench.script("pass"))
    where = "logs: runs/<date and time>-<script>-<id>/rank-0.log to rank-1.log"
    assert where in done.stdout.splitlines()
    assert not (bench.path / "runs").exists()


_ELASTIC = """
    import os, pathlib, time
    import paceline as pl
    from paceline.runtime import job

    pl.init()
    pathlib.Path(f"pid-{pl.rank()}").write_text(f"{os.getpid()}\\n")
    while not pathlib.Path("finish").exists():
        job.current().step_done()
        time.sleep(0.02)
"""


@pytest.mark.timeout(180)
def test_losses_of_an_elastic_job_are_in_the_record(bench: Workbench) -> None:
    script = bench.script(_ELASTIC)
    with bench.started("run", "-n", "2", "--min", "1", script) as launcher:
        pids = bench.wait_for_files("pid-0", "pid-1")
        wait_until(lambda: {0, 1} <= _reporting(bench), within_s=60)
        assert f"output in {_only_run(bench)}" in bench.run("status").stdout
        os.kill(int(pids[1]), signal.SIGKILL)
        wait_until(lambda: any(type(e) is MemberLost for e in _partly(bench)), within_s=60)
        (bench.path / "finish").touch()
        _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, stderr
    events = _events(_only_run(bench))
    (lost,) = [event for event in events if isinstance(event, MemberLost)]
    assert (lost.role, lost.number) == ("worker", 1) and isinstance(events[-1], RunEnded)


_KILLED_ONCE = """
    import os, pathlib, time
    import paceline as pl
    from paceline.runtime import job

    pl.init()
    for _ in range(5):
        job.current().step_done()
        time.sleep(0.2)
    if not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), 9)
"""


@pytest.mark.timeout(180)
def test_a_job_that_starts_again_goes_on_in_its_directory(bench: Workbench) -> None:
    done = bench.run("run", "-n", "1", "--restarts", "1", bench.script(_KILLED_ONCE))
    assert done.returncode == 0 and "restart 1 of 1" in done.stderr, done.stderr
    events = _events(_only_run(bench))
    kinds = [type(event) for event in events]
    assert kinds.count(RunStarted) == kinds.count(RunEnded) == 1 and kinds[-1] is RunEnded
    steps = [event.step for event in events if isinstance(event, ProgressReport)]
    # A report may cover more than one step, so the first number need not be 1.
    assert any(after < before for before, after in itertools.pairwise(steps)), steps


def _reporting(bench: Workbench) -> set[int]:
    return {event.rank for event in _partly(bench) if isinstance(event, ProgressReport)}


def _partly(bench: Workbench) -> list:
    path = _only_run(bench) / "events.jsonl"
    return [line.event for line in EventReader(path).lines()] if path.exists() else []


def test_a_job_in_the_background_keeps_its_events(bench: Workbench) -> None:
    script = bench.script(_REPORTING, "train.py")
    started = bench.run("run", "-n", "2", "--detach", script, PACELINE_LOG_DIR="none")
    assert started.returncode == 0, started.stderr
    run = _only_run(bench)
    assert run.name.endswith(started.stdout.strip()), "the name of the job is that of its run"
    assert bench.wait_for_files(str(run / "exit-code")) == ["0"]
    events = _events(run)
    assert isinstance(events[0], RunStarted) and isinstance(events[-1], RunEnded)
    assert (run / "rank-1.log").read_text() == "hello from 1\n"
    refused = bench.run("run", "--detach", "--log-dir", "train.py", script)
    assert refused.returncode == 2 and "train.py: File exists" in refused.stderr


def test_metrics_are_served_while_the_job_runs(bench: Workbench) -> None:
    script = bench.script(_REPORTING)
    options = ("--metrics-port", "0", "--log-dir", "none")
    with bench.started("run", "-n", "2", *options, script, "finish") as launcher:
        assert launcher.stderr is not None
        url = ""
        while not url:
            line = launcher.stderr.readline()
            url = line.strip().removeprefix("paceline: metrics at ") if "metrics at" in line else ""
        assert url.startswith("http://127.0.0.1:")
        page = ""

        def has_both() -> bool:
            nonlocal page
            page = urllib.request.urlopen(url, timeout=60).read().decode()
            return page.count("paceline_wait_share{") == 2

        wait_until(has_both, within_s=60)
        port = url.split(":")[2].split("/")[0]
        taken = bench.run("run", "--metrics-port", port, script)
        (bench.path / "finish").touch()
        launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert taken.returncode == 2, taken.stderr
    assert f"--metrics-port {port}: Address already in use" in taken.stderr
    assert "paceline_workers 2.0" in page
    assert 'paceline_wait_share{role="worker",worker="0"} 0.5' in page
    assert 'paceline_reported{name="<script>",role="worker",worker="1"} 0.5' in page
    assert 'paceline_reported{name="bad",role="worker",worker="1"} NaN' in page
    assert re.search(r'paceline_step\{role="worker",worker="0"\} \d+\.0', page)
    assert "python_info" not in page, "a registry of its own"


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_is_none(bench: Workbench, port: str) -> None:
    done = bench.run("run", "--metrics-port", port, bench.script("pass"))
    assert done.returncode == 2 and "--metrics-port" in done.stderr


def test_what_the_script_chose_becomes_part_of_the_configuration(bench: Workbench) -> None:
    script = bench.script(
        """
        import paceline as pl, torch
        pl.init()
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pl.distribute(model, optimizer, pace="local:4", precision="bf16")
        """
    )
    ended = bench.run("run", "-n", "2", "--log-dir", "kept", script)
    assert ended.returncode == 0, ended.stderr
    settings = json.loads((bench.path / "kept/config.json").read_text())
    assert settings["pace"] == {"value": "local:4", "origin": "script"}
    assert settings["precision"] == {"value": "bf16", "origin": "script"}
    assert settings["mesh"] == {"value": None, "origin": "script"}
