"""Reports of ranks on the screen: plain lines, the live table, the closing summary."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from run_support import COMMAND, Workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


# The control plane without the engine, so that no rank has to import torch.
_REPORTING = """
    import os, sys, time
    from paceline.cluster.agent import Agent
    from paceline.cluster.secret_file import load_secret
    from paceline.config import job_env
    from paceline.telemetry.events import Note, Progress

    env = job_env()
    secret = load_secret(env.secret_file)
    agent = Agent.connect(env.coordinator, secret, env.job_id, env.rank, "worker")
    for step in range(1, 11):
        agent.report(Progress(env.rank, step, {"loss": 1 / step, "\\x1b[2Jbad": 0.5}))
        time.sleep(float(sys.argv[1]))
    agent.report(Note(env.rank, "a note"))
    print("last line of", env.rank)
    agent.close()
    if env.rank == int(sys.argv[2]):
        sys.exit(5)
"""


def test_the_summary_shows_the_last_word_of_every_rank(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_REPORTING), "0.01", "-1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] last line of 0", "[1] last line of 1"]
    for rank in range(2):
        assert f"[{rank}] a note" in done.stderr
        row = rf"^ *{rank} +10 +[\d.]+ +0\.1 +0\.5 +finished$"
        assert re.search(row, done.stderr, re.M), done.stderr
    assert r"\x1b[2Jbad" in done.stderr and "\x1b[2J" not in done.stderr
    assert re.search(r"paceline: 2 ranks finished in \d+\.\d s\n$", done.stderr)


# A job as `distribute` makes it: steps are counted, the script reports now and then.
_COUNTED = """
    import paceline as pl
    from paceline import job

    pl.init()
    for step in range(1, 31):
        job.current().step_done({"compute %": 83.4 + pl.rank(), "comm %": 9.26})
        if step % 10 == 0:
            pl.report(loss=1 / step)
    assert job.current().steps_done == 30
    if pl.rank() == 1:
        pl.report(7, accuracy=0.5)
        job.current().step_done({})
    for wrong in (0.25, "7"):
        try:
            pl.report(wrong)
        except pl.errors.UsageError as error:
            print(error)
"""


def test_counted_steps_and_their_shares_are_shown(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_COUNTED))
    assert done.returncode == 0, done.stderr
    titles = r"^ *rank +step +steps/s +loss +accuracy +compute % +comm % +state$"
    assert re.search(titles, done.stderr, re.M), done.stderr
    counted = r"^ *0 +30 +\S+ +0\.03333 +- +83 +9 +finished$"
    assert re.search(counted, done.stderr, re.M), done.stderr
    numbered = r"^ *1 +7 +\S+ +0\.03333 +0\.5 +84 +9 +finished$"
    assert re.search(numbered, done.stderr, re.M), "the script's own number wins: " + done.stderr
    assert done.stdout.count("report(0.25): the step is a whole number") == 2
    assert done.stdout.count("report('7'): the step is a whole number") == 2


def test_progress_lines_come_every_few_seconds(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_REPORTING), "0.5", "-1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("paceline: step")]
    assert 1 <= len(lines) <= 2, done.stderr
    assert re.match(r"paceline: steps? .* steps/s, loss 0\.\d+", lines[0])


def test_the_failure_report_comes_after_the_summary(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_REPORTING), "0.01", "1")
    assert done.returncode == 5
    table, report = done.stderr.index(" steps/s"), done.stderr.index("rank 1 failed first")
    assert table < report
    assert re.search(r"^ *1 +10 .* failed: exit code 5$", done.stderr, re.M), done.stderr


def test_a_terminal_shows_a_live_table(bench: Workbench) -> None:
    script = bench.script(_REPORTING)
    main, side = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "2", script, "0.08", "-1"],
        cwd=bench.path,
        env={**bench.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=side,
    ) as launcher:
        os.close(side)
        screen = _read_all(main)
    os.close(main)
    assert launcher.returncode == 0, screen
    assert re.search(r"\[0\] \x1b\[0m(\x1b\[\w*m)*last line", screen), "only the prefix is coloured"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert "running" in plain, "the table while the job ran"
    assert "\x1b[2K" in screen or "\x1b[1A" in screen, "it was redrawn in place"
    assert plain.count("last line of 0") == 1
    assert "\x1b[?25h" in screen, "the cursor was given back"
    end = plain[plain.rindex("rank") - 200 :]
    assert "finished" in end and "2 ranks finished in" in end


def _read_all(fd: int) -> str:
    data = b""
    try:
        while piece := os.read(fd, 65536):
            data += piece
    except OSError:  # the kernel's way of saying that the far end is closed
        pass
    return data.decode(errors="replace")
