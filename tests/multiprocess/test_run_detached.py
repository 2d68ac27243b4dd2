"""Jobs in the background, and the commands that find, watch and change them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_support import COMMAND, END_S, Workbench, is_alive, read_until, wait_until

from paceline.observe.telemetry.events import RunEnded, RunStarted
from paceline.observe.telemetry.file_formats import EventReader

_TRAIN = """
    import os, pathlib, time
    import torch
    import paceline as pl

    def write(name, value):  # whole or not at all, also when we are killed at it
        pathlib.Path(f"{name}.{os.getpid()}").write_text(f"{value}\\n")
        os.rename(f"{name}.{os.getpid()}", name)

    job = pl.init()
    model = torch.nn.Linear(4, 2)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while not pathlib.Path("finish").exists():
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.steps_done > 2:
            write(f"pid-{job.env.number}", os.getpid())
            write("size", pl.world_size())
        time.sleep(0.02)
    print(f"worker {job.env.number} is done")
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path)
    yield bench
    if bench.left_behind():  # whatever a failed test left running
        bench.run("stop")


def _status(bench: Workbench) -> str:
    done = bench.run("status")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _size(bench: Workbench) -> str:
    return bench.wait_for_files("size")[0]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_detached_job_outlives_its_supervisor_and_can_be_changed(bench: Workbench) -> None:
    script = bench.script(_TRAIN)
    started = bench.run("run", "-n", "2", "--min", "1", "--max", "3", "--detach", script)
    assert started.returncode == 0, started.stderr
    name = started.stdout.strip()
    assert re.fullmatch(r"script-[0-9a-f]{4}", name) and f"paceline attach {name}" in started.stderr
    first = [int(pid) for pid in bench.wait_for_files("pid-0", "pid-1")]
    told = _status(bench)
    assert f"worker 1 (rank 1, host {os.uname().nodename}, pid {first[1]})" in told

    scaled = bench.run("scale", name, "-n", "3")
    assert scaled.returncode == 0 and "3 workers from now on" in scaled.stdout
    wait_until(lambda: _size(bench) == "3", within_s=80)
    refused = bench.run("scale", "-n", "4")
    assert refused.returncode == 2 and "may have 1 to 3 workers (--min, --max)" in refused.stderr

    supervisor = int(re.findall(r"supervisor pid (\d+)", told)[0])
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not is_alive(supervisor))
    assert all(is_alive(pid) for pid in first), "they do not end with the supervisor"
    lost = bench.run("status")
    assert lost.returncode == 1 and f"`paceline attach {name}` starts them again" in lost.stderr
    assert bench.left_behind() != [], "and are not swept away"
    assert bench.run("run", bench.script("pass", "other.py")).returncode == 0
    assert bench.left_behind() != []

    with subprocess.Popen(
        [*COMMAND, "attach"], cwd=bench.path, env=bench.environ, stdout=subprocess.PIPE, text=True
    ) as attached:
        wait_until(lambda: bench.run("status").returncode == 0, within_s=80)
        os.kill(first[1], signal.SIGKILL)
        wait_until(lambda: bench.wait_for_files("pid-1")[0] != str(first[1]), within_s=80)
        assert bench.run("scale", "-n", "1").returncode == 0
        wait_until(lambda: _size(bench) == "1", within_s=80)
        (bench.path / "finish").touch()
        output, _ = attached.communicate(timeout=END_S)
    assert attached.returncode == 0, output
    assert re.search(rf"worker 1 \(host \S+, pid {first[1]}\) lost: ended with unknown", output)
    assert "[0] worker 0 is done" in output and "no longer wanted, and leaves" in output
    assert bench.left_behind() == []
    (run,) = (bench.path / "runs").iterdir()
    reading = EventReader(run / "events.jsonl")
    events = [line.event for line in reading.lines()]
    kinds = [type(event) for event in events]
    assert kinds[0] is RunStarted and kinds[-1] is RunEnded, "one record, of two supervisors"
    assert kinds.count(RunStarted) == 1 and reading.damaged <= 1
    times = [line.t for line in reading.lines()]
    assert times == sorted(times)


def test_stop_ends_a_job_and_what_cannot_be_found_is_said(bench: Workbench) -> None:
    nothing = bench.run("status")
    assert nothing.returncode == 1 and "no job of yours runs on this host" in nothing.stderr
    script = bench.script("""
        import os, pathlib, time
        pathlib.Path("pid-" + os.environ["RANK"]).write_text(f"{os.getpid()}\\n")
        time.sleep(100)
    """)
    started = bench.run("run", "-n", "2", "--detach", "--log-dir", "logs", script)
    assert started.returncode == 0 and str(bench.path / "logs") in started.stderr
    pids = bench.wait_for_files("pid-0", "pid-1")
    other = bench.run("status", "nonsense")
    assert other.returncode == 2 and "nonsense is no running job; running: script-" in other.stderr
    assert "forming: waiting for ranks 0, 1" in _status(bench)
    assert bench.run("servers").stdout == "the job has no servers\n"
    assert bench.run("stop").returncode == 0
    assert not any(is_alive(pid) for pid in pids) and bench.left_behind() == []
    assert "stopped by SIGTERM" in (bench.path / "logs" / "job.log").read_text()
    assert (bench.path / "logs" / "exit-code").read_text() == "143\n"


def test_a_job_that_cannot_start_in_the_background_says_why(bench: Workbench) -> None:
    broken = {**bench.environ, "PACELINE_LEASE_S": "soon"}
    done = subprocess.run(
        [*COMMAND, "run", "--detach", bench.script("pass")],
        cwd=bench.path,
        env=broken,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 1
    assert "the job did not start:" in done.stderr and "PACELINE_LEASE_S='soon'" in done.stderr
    assert bench.left_behind() == []


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_worker_joins_by_hand(bench: Workbench) -> None:
    script = bench.script(_TRAIN)
    with bench.started("run", "-n", "1", "--max", "2", script) as launcher:
        bench.wait_for_files("pid-0")
        secret, address = (
            re.findall(r"secret file (\S+)", _status(bench)),
            re.findall(r"coordinator (\S+),", _status(bench)),
        )
        job_id = re.findall(r"\(id (\w+),", _status(bench))[0]
        command = ("join", "--coordinator", address[0], "--secret-file", secret[0], job_id, script)
        with _joined(bench, *command) as joined:
            wait_until(lambda: _size(bench) == "2", within_s=80)
            full = bench.run("join", script)
            assert full.returncode == 1 and "the most that it may have (--max 2)" in full.stderr
            (bench.path / "finish").touch()
            output, errors = joined.communicate(timeout=END_S)
            assert joined.returncode == 0, errors
        _, said = launcher.communicate(timeout=END_S)
        assert launcher.returncode == 0, said
    assert f"joining job {job_id} as worker 1" in errors and "worker 1 is done" in output
    assert re.search(rf"worker 1 \(host \S+, pid {joined.pid}\) joined", said)


def _joined(bench: Workbench, *command: str) -> subprocess.Popen[str]:
    """Start `paceline join` in the background."""
    return subprocess.Popen(
        [*COMMAND, *command],
        cwd=bench.path,
        env=bench.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


_SLOW_EXIT = """
    import atexit, os, pathlib, time

    def linger():  # after the worker has left the job
        while not pathlib.Path("exit").exists():
            time.sleep(0.02)

    if os.environ.get("PACELINE_JOINS"):
        atexit.register(linger)
"""


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_worker_that_joined_by_hand_may_take_long_to_exit(bench: Workbench) -> None:
    """The launcher gives it more than --grace: it was not asked to stop, it exits by itself."""
    script = bench.script(_SLOW_EXIT + _TRAIN)
    with bench.started("run", "-n", "1", "--max", "2", "--grace", "0", script) as launcher:
        bench.wait_for_files("pid-0")
        with _joined(bench, "join", script) as joined:
            wait_until(lambda: _size(bench) == "2", within_s=80)
            (bench.path / "finish").touch()
            said = read_until(launcher.stderr, "waiting for worker 1 to exit")
            (bench.path / "exit").touch()
            output, errors = joined.communicate(timeout=END_S)
        assert joined.returncode == 0, errors
        assert "worker 1 is done" in output
        assert launcher.wait(END_S) == 0, said
