"""`paceline run -s`: servers are started, watched and stopped by the same command."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from run_support import END_S, Workbench, is_alive, wait_until

import paceline as pl
from paceline.errors import LaunchError
from paceline.launcher.function.launch import launch
from paceline.runtime import job


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


# Trains for a number of steps, or until it is stopped; writes the pids of everybody in the job.
_TRAIN = """
    import itertools, os, pathlib, sys, time
    import torch
    import paceline as pl

    pl.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    steps = int(sys.argv[1])
    for step in itertools.count():
        if step == steps:
            break
        x = torch.randn(8, 10)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3:
            pathlib.Path("pid-" + os.environ["RANK"]).write_text(f"{os.getpid()}\\n")
        if steps < 0:
            time.sleep(0.01)
    print("loss", loss.item() < 1.0, pl.world_size(), os.environ["WORLD_SIZE"])
"""


@pytest.mark.parametrize(
    ("servers", "count", "pace"),
    [
        pytest.param("1", "1 server", "ssp:3", marks=pytest.mark.slow),
        ("2", "2 servers", "ps"),
        pytest.param("colocated", "2 servers", "async", marks=pytest.mark.slow),
    ],
)
def test_a_script_trains_through_servers(
    bench: Workbench, servers: str, count: str, pace: str
) -> None:
    script = bench.script(_TRAIN)
    options = ("-s", servers, "--pace", pace, "--log-dir", "logs")
    done = bench.run("run", "-n", "2", *options, script, "40")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] loss True 2 2", "[1] loss True 2 2"]
    where = "paceline: logs, events and TensorBoard files are in logs"
    end = rf"paceline: 2 ranks and {count} finished in \d+\.\d s\n{where}\n$"
    assert re.search(end, done.stderr), done.stderr
    version = {"ps": 40}.get(pace, 80)
    assert re.search(rf": version {version}; staleness in versions", done.stderr), done.stderr
    assert len(re.findall(r"^ +[01] +40 +\d", done.stderr, re.M)) >= 2, "a line per worker"
    logs = {path.name for path in (bench.path / "logs").iterdir()}
    assert logs >= {"rank-0.log", "rank-1.log", "server-0.log"}
    assert bench.left_behind() == []


def test_the_script_may_choose_the_pace_itself(bench: Workbench) -> None:
    script = bench.script(_TRAIN.replace("lr=0.05))", 'lr=0.05), pace="ssp:1")'))
    done = bench.run("run", "-n", "1", "-s", "1", script, "5")
    assert done.returncode == 0, done.stderr
    assert ": version 5; staleness" in done.stderr


def test_servers_of_a_script_that_never_joins_are_stopped_without_a_word(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", "-s", "1", bench.script("print('done')"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"]
    assert "failed" not in done.stderr and bench.left_behind() == []


def _children_of(pid: int) -> dict[str, str]:
    """Return the pids of a launcher's children by their command."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "): child for child in found}


def _server_of(launcher_pid: int) -> str:
    children = _children_of(launcher_pid)
    (server,) = [
        pid for command, pid in children.items() if "paceline.runtime.server_main" in command
    ]
    return server


def test_a_server_that_is_killed_is_the_first_cause(bench: Workbench) -> None:
    options = ("-n", "2", "-s", "1", "--pace", "ssp:3", "--log-dir", "logs")
    with bench.started("run", *options, bench.script(_TRAIN), "-1") as launcher:
        pids = bench.wait_for_files("pid-0", "pid-1")
        server = _server_of(launcher.pid)
        os.kill(int(server), signal.SIGKILL)
        _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    report = errors[errors.index("paceline: server 0 failed first: killed by SIGKILL") :]
    assert f"(pid {server}, whole output in logs/server-0.log)" in report.splitlines()[0]
    stopped = re.findall(r"paceline: ranks? [0-1-]+: stopped because server 0 failed", report)
    assert stopped and "failed as well" not in report, report
    assert not any(map(is_alive, [*pids, server])) and bench.left_behind() == []


def test_a_worker_that_fails_ends_the_servers(bench: Workbench) -> None:
    script = bench.script("""
        import paceline as pl
        pl.init()
        if pl.rank() == 1:
            raise ValueError("the cause")
        pl.world().barrier()
    """)
    done = bench.run("run", "-n", "2", "-s", "1", script)
    assert done.returncode == 1
    assert "paceline: rank 1 failed first: exit code 1" in done.stderr
    assert "server 0 failed" not in done.stderr and "failed as well" not in done.stderr
    assert bench.left_behind() == []


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_servers_end_with_the_launcher(bench: Workbench, number: signal.Signals) -> None:
    options = ("-n", "1", "-s", "1", "--pace", "async")
    with bench.started("run", *options, bench.script(_TRAIN), "-1") as launcher:
        pids = [*bench.wait_for_files("pid-0"), _server_of(launcher.pid)]
        launcher.send_signal(number)
        launcher.communicate(timeout=END_S)
        wait_until(lambda: not any(map(is_alive, pids)), within_s=30.0)
        wait_until(lambda: bench.left_behind() == [], within_s=30.0)
    assert launcher.returncode == (130 if number == signal.SIGINT else -9)


def test_a_frozen_server_does_not_hold_up_the_end(bench: Workbench) -> None:
    script = bench.script("""
        import os, pathlib, time
        import paceline as pl
        pl.init()
        pathlib.Path("joined").write_text("yes\\n")
        while not pathlib.Path("go").exists(): time.sleep(0.01)
        os._exit(0)
    """)
    with bench.started("run", "-s", "1", script) as launcher:
        bench.wait_for_files("joined")
        server = _server_of(launcher.pid)
        os.kill(int(server), signal.SIGSTOP)
        (bench.path / "go").touch()
        _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 0, errors
    assert "failed" not in errors and not is_alive(server)


def test_dry_run_shows_servers(bench: Workbench) -> None:
    script = bench.script("import pathlib; pathlib.Path('ran').touch()")
    options = ("-n", "2", "-s", "colocated", "--pace", "ssp:3", "--log-dir", "logs")
    done = bench.run("run", *options, "--dry-run", script)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in lines if " -m paceline.runtime.server_main" in line] == [
        "[s0]",
        "[s1]",
    ]
    assert {"[s1]     PACELINE_ROLE=server", "[s1]     PACELINE_RANK=1"} <= set(lines)
    assert {"[1]     PACELINE_SERVERS=2", "[s1]     OMP_NUM_THREADS=2"} <= set(lines)
    assert lines[-1] == "logs: logs/rank-0.log to rank-1.log and server-0.log to server-1.log"
    assert not (bench.path / "ran").exists() and not (bench.path / "logs").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pace", "ssp:3"], "pace ssp:3 needs parameter servers: add -s 1 (or -s colocated)"),
        (["--pace", "ps", "-s", "0"], "pace ps needs parameter servers: add -s 1"),
        (["--env", "PACELINE_PACE=async"], "PACELINE_PACE: pace async needs parameter servers"),
        (["--pace", "allreduce", "-s", "2"], "uses no parameter servers: leave out -s 2"),
        (["--pace", "gossip", "-s", "1"], "(its workers exchange with their neighbours only"),
        (["--pace", "partial:0.5", "-s", "1"], "(its workers average gradients among themselves"),
        (["--pace", "easgd:4[mode=async]"], "pace easgd:4[mode=async] needs parameter servers"),
        (["-s", "-1"], "-s -1: expected a number from 0 to 1024"),
        (["-s", "many"], "-s many: expected a number or colocated"),
        (["-s", "1", "--replicas", "2"], "replicas 2 > servers 1: "),
        (["-s", "2", "--replicas", "0"], "--replicas 0: expected a number of at least 1"),
        (["-s", "1", "--threads-per-server", "0"], "--threads-per-server 0"),
        (["--threads-per-server", "2"], "--threads-per-server without servers"),
        (["--pace", "ssp:-1", "-s", "1"], "pace 'ssp:-1'"),
        (["-n", "0", "-s", "colocated"], "-n 0: expected a number from 1"),
        (["--env", "PACELINE_SERVERS=1"], "the launcher sets PACELINE_SERVERS"),
    ],
)
def test_a_wrong_command_line_gets_one_line_and_code_2(
    bench: Workbench, options: list[str], words: str
) -> None:
    done = bench.run("run", *options, bench.script("raise SystemExit('must not run')"))
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.startswith("paceline: error: ")
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def _step(steps: int) -> float:
    import torch

    pl.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in range(steps):
        x = torch.randn(8, 10)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
    return next(iter(model.parameters())).sum().item()


def test_a_launched_function_trains_through_servers() -> None:
    first, second = launch(_step, 5, workers=2, servers=2, pace="ps", timeout_s=60)
    assert first == second != 0.0
    assert launch(_step, 5, workers=2, servers=1, pace="ssp:2", timeout_s=60)


def test_a_launched_server_that_dies_is_named() -> None:
    def end_the_server() -> None:
        pl.init()
        (server,) = (m for m in job.current().fabric.membership.members if m.role == "server")
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: False, within_s=30)

    with pytest.raises(LaunchError, match="server 0 failed first: killed by SIGKILL"):
        launch(end_the_server, workers=1, servers=1, timeout_s=60)
