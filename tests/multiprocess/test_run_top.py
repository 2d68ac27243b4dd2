"""`paceline top`: a running job, seen from another terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_support import COMMAND, END_S, Workbench, wait_until


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


# The control plane without the engine, so that no rank has to import torch. Ends with the file.
_TRAINING = """
    import os, sys, time
    from paceline.control.client.agent import Agent
    from paceline.control.member import Member
    from paceline.control.transport.auth import load_secret
    from paceline.runtime.config import job_env
    from paceline.observe.telemetry.clock import now_s
    from paceline.observe.telemetry.events import ProgressReport
    from paceline.observe.telemetry.step_times import StepTimes

    env = job_env()
    secret = load_secret(env.secret_file)
    agent = Agent.connect(env.coordinator, secret, env.job_id, env.rank, "worker")
    place = (env.rank, "worker", env.host_id, "here", os.getpid(), env.local_rank, "", "")
    agent.join(Member(*place, env.number), 30.0)
    step = 0
    while not os.path.exists("enough"):
        step += 1
        times = StepTimes(step, now_s(), 0.05, 0.01, 0.02, 16)
        agent.report(ProgressReport(env.rank, step, {"loss": 1 / step}, steps=(times,)))
        if step == 10:
            open(f"up.{env.rank}", "w").write("up\\n")
        time.sleep(0.05)
    agent.close()
"""


def _end(bench: Workbench) -> None:
    (bench.path / "enough").touch()


def _table(bench: Workbench, *patterns: str) -> list[str]:
    """Print a table until these are in it: who hears of less than two reports has no rates."""
    table = ""

    def is_complete() -> bool:
        nonlocal table
        done = bench.run("top", "--once")
        assert done.returncode == 0, done.stderr
        table = done.stdout
        return all(re.search(pattern, table, re.M) for pattern in patterns)

    wait_until(is_complete)
    return table.splitlines()


def test_once_prints_a_table(bench: Workbench) -> None:
    script = bench.script(_TRAINING)
    with bench.started("run", "-n", "2", "--log-dir", "none", script) as launcher:
        bench.wait_for_files("up.0", "up.1")
        lines = _table(bench, r" samples/s in all$")
        assert lines[0].split() == [
            "rank", "step", "samples/s", "loss", "input", "%", "wait", "%", "state",
        ]  # fmt: skip
        for rank in range(2):
            row = rf" *{rank} +\d+ +[\d.]+ +0\.\d+ +20 +40 +running"
            assert re.fullmatch(row, lines[1 + rank]), lines
        assert launcher.poll() is None, "the job goes on"
        _end(bench)
        assert launcher.wait(END_S) == 0


def test_a_job_that_ends_while_it_is_watched(bench: Workbench) -> None:
    script = bench.script(_TRAINING)
    with bench.started("run", "-n", "2", "--log-dir", "kept", script):
        bench.wait_for_files("up.0", "up.1")
        with bench.started("top", "script") as onlooker:
            assert onlooker.stdout is not None
            first = onlooker.stdout.readline()
            assert re.fullmatch(r"paceline: job script-\w+: script\.py\n", first)
            second = onlooker.stdout.readline()
            assert re.match(r"paceline: steps? \d+.* steps/s, [\d.]+ samples/s, loss 0\.", second)
            _end(bench)
            rest = onlooker.stdout.read()
            assert onlooker.wait(END_S) == 0
    assert re.search(r"paceline: job script-\w+ has ended: 2 ranks finished in \d", rest), rest


def test_without_a_record_it_says_what_it_heard(bench: Workbench) -> None:
    script = bench.script(_TRAINING)
    with bench.started("run", "-n", "2", "--log-dir", "none", script):
        bench.wait_for_files("up.0", "up.1")
        with bench.started("top") as onlooker:
            assert onlooker.stdout is not None
            onlooker.stdout.readline()
            _end(bench)
            rest = onlooker.stdout.read()
            assert onlooker.wait(END_S) == 0
    assert re.search(r"has ended: ranks 0-1 finished$", rest, re.M), rest


def test_no_job_is_the_error_of_status(bench: Workbench) -> None:
    told = bench.run("top")
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == bench.run("status").stderr != ""


class _Watching:
    """`paceline top` in a terminal of its own."""

    def __init__(self, bench: Workbench, columns: str) -> None:
        self._main, side = pty.openpty()
        self.data = ""
        self.process = subprocess.Popen(
            [*COMMAND, "top"],
            cwd=bench.path,
            env={**bench.environ, "TERM": "xterm", "COLUMNS": columns, "LINES": "24"},
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(side)

    def read_until(self, is_enough: Callable[[str], bool]) -> str:
        deadline_s = time.monotonic() + END_S
        while not is_enough(self.data):
            assert time.monotonic() < deadline_s, self.data
            try:
                piece = os.read(self._main, 65536)
            except OSError:  # the far end is closed
                break
            self.data += piece.decode(errors="replace")
        return self.data

    def press(self, key: bytes) -> str:
        os.write(self._main, key)
        self.read_until(lambda _: False)
        assert self.process.wait(END_S) == 0, self.data
        os.close(self._main)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.data)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # What a shell without jobs starts in the background ignores Ctrl-C, and all that it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("key", "columns"), [(b"q", "80"), (b"\x03", "40")])
def test_a_key_leaves_and_the_job_goes_on(bench: Workbench, key: bytes, columns: str) -> None:
    script = bench.script(_TRAINING)
    with bench.started("run", "-n", "2", "--log-dir", "none", script) as launcher:
        bench.wait_for_files("up.0", "up.1")
        watching = _Watching(bench, columns)
        watching.read_until(lambda data: data.count("samples/s") > 4)
        plain = watching.press(key)
        assert re.search(r"\x1b\[\d+A\x1b\[J", watching.data), "it was redrawn in place"
        assert "\x1b[?25h" in watching.data, "the cursor was given back"
        assert re.search(
            r"no longer watching; job script-\w+ continues", plain.replace("\r\n", " ")
        )
        table = [line for line in plain.split("\r\n") if re.match(r" *[01] +\d+ ", line)]
        assert table and all(len(line) < int(columns) for line in table), plain
        assert launcher.poll() is None
        _end(bench)
        assert launcher.wait(END_S) == 0


# An elastic job has its coordinator in a process of its own.
_ELASTIC = """
    import os, time
    import torch
    import paceline as pl

    pl.init()
    model = torch.nn.Linear(4, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 100_000):
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pl.report(loss=loss.item())
        if step == 10:
            open(f"up.{pl.rank()}", "w").write("up\\n")
        time.sleep(0.02)
        stop = torch.tensor([float(os.path.exists("enough"))])
        if pl.world().all_reduce(stop, op="max").item():
            break
"""


def test_an_elastic_job_is_watched_alike(bench: Workbench) -> None:
    script = bench.script(_ELASTIC)
    with bench.started("run", "-n", "2", "--min", "1", "--log-dir", "none", script) as launcher:
        bench.wait_for_files("up.0", "up.1")
        titles = _table(bench, r"^ *1 +\d+ +[\d.]+ .* running$", "wait %")[0]
        assert "wait %" in titles and "loss" in titles
        _end(bench)
        wait_until(lambda: launcher.poll() is not None, within_s=END_S)
    assert launcher.returncode == 0
