"""`paceline run --min ...`: real losses under the real launcher, told in lines that people read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from run_support import END_S, Workbench, is_alive, read_until, wait_until

_TRAIN = """
    import os, pathlib, sys, time
    import packaging.version
    import torch
    import paceline as pl

    def write(name, value):  # whole or not at all, also when we are killed at it
        pathlib.Path(f"{name}.{os.getpid()}").write_text(f"{value}\\n")
        os.rename(f"{name}.{os.getpid()}", name)

    job = pl.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    until = int(sys.argv[1])
    while job.steps_done < until:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.steps_done > 2:
            write(f"pid-{job.env.number}", os.getpid())
        if pathlib.Path("finish").exists():
            until = 0
        time.sleep(0.02)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def _pid(bench: Workbench, number: int) -> int:
    return int(bench.wait_for_files(f"pid-{number}")[0])


def _replaced(bench: Workbench, number: int, old: int) -> int:
    """Wait until another process works in a place."""
    wait_until(lambda: _pid(bench, number) != old, within_s=END_S)
    return _pid(bench, number)


def _child(launcher: subprocess.Popen[str], program: str) -> int:
    """Find a child of the launcher by the module that it runs."""
    wait_until(lambda: bool(_children(launcher, program)), within_s=END_S)  # it shows its command
    (found,) = _children(launcher, program)
    return found


def _children(launcher: subprocess.Popen[str], program: str) -> list[int]:
    found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    words = dict[str, list[str]]()
    for pid in found:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            words[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return [int(pid) for pid, command in words.items() if program in command]


def _end(bench: Workbench, launcher: subprocess.Popen[str]) -> str:
    """Let the script finish; return what the launcher said."""
    (bench.path / "finish").touch()
    assert launcher.stderr is not None
    errors = launcher.stderr.read()
    assert launcher.wait(END_S) == 0, errors
    assert bench.left_behind() == []
    return errors


def test_a_killed_worker_is_replaced_and_a_killed_coordinator_comes_back(bench: Workbench) -> None:
    script = bench.script(_TRAIN)
    with bench.started("run", "-n", "2", "--min", "1", script, "100000") as launcher:
        first = _pid(bench, 1)
        _pid(bench, 0)
        os.kill(first, signal.SIGKILL)
        second = _replaced(bench, 1, first)
        said = read_until(launcher.stderr, f"pid {second}) joined")
        os.kill(_child(launcher, "paceline.runtime.coordinator_main"), signal.SIGKILL)
        said += read_until(launcher.stderr, "and was started again")
        coordinator = _child(launcher, "paceline.runtime.coordinator_main")
        assert "libtorch" in Path(f"/proc/{coordinator}/maps").read_text()  # forked as workers are
        os.kill(second, signal.SIGKILL)  # nobody may be forgotten in the journal
        third = _replaced(bench, 1, second)
        said += read_until(launcher.stderr, f"pid {third}) joined")
        assert len(_children(launcher, "paceline: template")) == 2  # one for replacements
        said += _end(bench, launcher)
    line = r"^\d\d:\d\d:\d\d worker 1 \(host \S+, pid {}\) "
    assert re.search(
        line.format(first) + "lost: killed by signal 9; continuing with 1 worker",
        said,
        re.MULTILINE,
    )
    assert re.search(line.format(second) + r"joined .*\d s after the loss", said, re.MULTILINE)
    assert "the coordinator ended (killed by SIGKILL (killed)) and was started again" in said
    assert re.search(line.format(third) + "joined", said, re.MULTILINE)
    assert "paceline: 2 losses (worker 1 2 times), 2 replaced" in said
    assert not any(is_alive(pid) for pid in (first, second, third))


_LOST_EARLY = """
    import os, pathlib, sys
    place, number = os.environ["PACELINE_RANK"], int(sys.argv[1])
    if place == "1":
        starts = len(list(pathlib.Path().glob("start-*")))
        pathlib.Path(f"start-{starts}").touch()
    def lose(moment):
        if place == "1" and moment == starts < number:
            os.kill(os.getpid(), 9)
    lose(0)
    import torch
    import paceline as pl
    pl.init()
    lose(1)
    model = torch.nn.Linear(4, 2)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    lose(2)
    for step in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_job_that_loses_a_worker_before_the_first_step_starts_again(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", "--min", "2", bench.script(_LOST_EARLY), "2")
    assert done.returncode == 0, done.stderr
    words = "worker 1 (killed by SIGKILL (killed)) was lost before the first step: restarting all"
    assert done.stderr.count(words) == 2
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_job_that_cannot_be_set_up_is_not_started_for_ever(bench: Workbench) -> None:
    script = bench.script("import os; os.kill(os.getpid(), 9)")
    done = bench.run("run", "-n", "2", "--min", "1", script)
    assert done.returncode == 137 and done.stderr.count("restarting all processes") == 3
    script = bench.script("raise ValueError('mine')")
    done = bench.run("run", "-n", "2", "--min", "1", script)
    assert done.returncode == 1 and "restarting all processes" not in done.stderr


@pytest.mark.slow
def test_a_stopped_worker_is_named_then_ended_and_replaced(bench: Workbench) -> None:
    script = bench.script(_TRAIN)
    with bench.started(
        *("run", "-n", "2", "--on-loss", "replace", "--env", "PACELINE_LEASE_S=3"),
        *(script, "100000"),
    ) as launcher:
        stopped = _pid(bench, 1)
        _pid(bench, 0)
        os.kill(stopped, signal.SIGSTOP)
        _replaced(bench, 1, stopped)
        assert not is_alive(stopped), "it must not wake up in memory that others use"
        said = _end(bench, launcher)
    assert re.search(rf"pid {stopped}\) is silent: .*its process is stopped", said)
    assert re.search(
        rf"pid {stopped}\) lost: its process has been stopped for [\d.]+ s; the oth", said
    )


# Rank 0 has rank 1 evicted while the launcher is stopped: it sees the end before it hears of that.
_EVICTED = """
    import os, signal, sys, time
    import paceline as pl

    def read(name):
        while not (os.path.exists(name) and open(name).read()):
            time.sleep(0.01)
        return int(open(name).read())

    job = pl.init()
    if job.env.is_newcomer:
        sys.exit()
    agent = job.rendezvous.agent
    if job.env.rank == 1:
        open("worker", "w").write(str(os.getpid()))
        while agent.ending is None:
            time.sleep(0.01)
        raise agent.ending
    launcher, worker = read("launcher"), read("worker")
    time.sleep(0.5)  # until the launcher knows that the job has begun
    os.kill(launcher, signal.SIGSTOP)
    agent.report_unreachable(1, "it does not answer")
    while open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    os.kill(launcher, signal.SIGCONT)
    time.sleep(1.0)
    print("rank 0 goes on")
"""


def test_an_evicted_worker_is_a_loss_also_when_its_end_is_seen_first(bench: Workbench) -> None:
    options = ("--log-dir", "none", "-n", "2", "--min", "1")
    with bench.started("run", *options, bench.script(_EVICTED)) as launcher:
        (bench.path / "launcher").write_text(str(launcher.pid))
        said, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 0, errors
    assert "[0] rank 0 goes on" in said
    assert "Evicted: rank 1 was taken for lost" in errors
    assert re.search(r"worker 1 .* lost: rank 0 cannot reach it: it does not answer", errors)


def test_too_few_workers_end_the_job_with_the_reason(bench: Workbench) -> None:
    script = bench.script(_TRAIN)
    with bench.started("run", "-n", "2", "--min", "2", script, "100000") as launcher:
        pid = _pid(bench, 1)
        _pid(bench, 0)
        os.kill(pid, signal.SIGKILL)
        _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 137
    assert "paceline: the job ended: 1 worker is left, expected at least 2 (--min)" in errors
    assert "the last loss was worker 1: killed by SIGKILL (killed) after" in errors
    assert bench.left_behind() == []


def test_a_script_that_fails_by_itself_ends_the_job(bench: Workbench) -> None:
    script = bench.script("""
        import sys, time
        import paceline as pl
        pl.init()
        if pl.rank() == 1:
            raise ValueError("no such file: weights.pt")
        time.sleep(60)
    """)
    done = bench.run("run", "-n", "2", "--min", "1", script)
    assert done.returncode == 1
    assert "paceline: rank 1 failed first: exit code 1" in done.stderr
    assert "lost" not in done.stderr and "joined" not in done.stderr


@pytest.mark.slow
def test_a_place_whose_newcomers_die_at_once_is_given_up(bench: Workbench) -> None:
    script = bench.script("""
        import os, pathlib, signal, sys, time
        import paceline as pl
        if os.environ.get("PACELINE_JOINS"):
            sys.exit("this script cannot come later")
        pl.init()
        pathlib.Path(f"pid-{pl.rank()}").write_text(f"{os.getpid()}\\n")
        time.sleep(100)
    """)
    with bench.started("run", "-n", "2", "--on-loss", "replace", script) as launcher:
        pid = _pid(bench, 1)
        _pid(bench, 0)
        os.kill(pid, signal.SIGKILL)
        _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode != 0
    assert errors.count("worker 1 ended before it joined: exit code 1") == 3
    assert "3 newcomers in a row ended before they joined as worker 1" in errors
    assert "  | this script cannot come later" in errors


def _limited(
    bench: Workbench, limit: int, script: str, *options: str
) -> subprocess.CompletedProcess[str]:
    import resource
    import sys

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", "-n", "8", *options, script],
        cwd=bench.path,
        env=bench.environ,
        preexec_fn=few_files,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("--min", "2")], ids=["fixed", "elastic"])
@pytest.mark.parametrize("imports", ["time", "time, paceline"], ids=["fresh", "template"])
def test_without_descriptors_there_is_no_partial_job(
    bench: Workbench, imports: str, options: tuple[str, ...]
) -> None:
    """Whichever descriptor is the one too many, of interpreters or of forks of the template."""
    script = bench.script(f"import {imports}; time.sleep(30)")
    for limit in (24, 25, 26):
        done = _limited(bench, limit, script, *options)
        assert done.returncode == 1
        assert "LaunchError" in done.stderr and "open files" in done.stderr
        assert "Traceback" not in done.stderr and bench.left_behind() == []
