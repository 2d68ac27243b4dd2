"""Reports of ranks on the screen: plain lines, the live table, the closing summary."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest
from run_support import COMMAND, Workbench, read_until

from paceline.observe.display.screen import PLAIN_EVERY_S


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


# The control plane without the engine, so that no rank has to import torch.
_REPORTING = """
    import os, sys, time
    from paceline.control.client.agent import Agent
    from paceline.control.transport.auth import load_secret
    from paceline.runtime.config import job_env
    from paceline.observe.telemetry.events import Note, ProgressReport

    env = job_env()
    secret = load_secret(env.secret_file)
    agent = Agent.connect(env.coordinator, secret, env.job_id, env.rank, "worker")
    for step in range(1, 11):
        while step == 10 and sys.argv[3:] and not os.path.exists(sys.argv[3]):
            time.sleep(0.02)
        agent.report(ProgressReport(env.rank, step, {"loss": 1 / step, "\\x1b[2Jbad": 0.5}))
        time.sleep(float(sys.argv[1]))
    agent.report(Note(env.rank, "a note"))
    print("last line of", env.rank)
    agent.close()
    if env.rank == int(sys.argv[2]):
        sys.exit(5)
"""


def test_the_summary_shows_the_last_word_of_every_rank(bench: Workbench) -> None:
    quiet = ("--log-dir", "none")
    done = bench.run("run", "-n", "2", *quiet, bench.script(_REPORTING), "0.01", "-1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] last line of 0", "[1] last line of 1"]
    for rank in range(2):
        assert f"[{rank}] a note" in done.stderr
        row = rf"^ *{rank} +10 +[\d.]+ +0\.1 +0\.5 +finished$"
        assert re.search(row, done.stderr, re.M), done.stderr
    assert re.search(r"^paceline: script\.py 0\.01 -1: 10 steps, [\d.]+ steps/s, loss 0\.1$",
                     done.stderr, re.M), done.stderr  # fmt: skip
    assert r"\x1b[2Jbad" in done.stderr and "\x1b[2J" not in done.stderr
    assert re.search(r"paceline: 2 ranks finished in \d+\.\d s\n$", done.stderr)


# A job as `distribute` makes it: steps are counted, the script reports now and then.
_COUNTED = """
    import time

    import paceline as pl
    from paceline.runtime import job

    pl.init()
    job.current().reporter.begin()
    for step in range(1, 31):
        began_s = time.monotonic()
        time.sleep(0.01)
        slept_s = time.monotonic() - began_s  # it may be much longer
        job.current().step_done({}, waited_s=0.6 * slept_s if pl.rank() else 0.0)
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
    titles = r"^ *rank +step +steps/s +loss +accuracy +input % +compute % +wait % +state$"
    assert re.search(titles, done.stderr, re.M), done.stderr
    counted = r"^ *0 +30 +[\d.]+ +0\.03333 +- +0 +100 +0 +finished$"
    assert re.search(counted, done.stderr, re.M), done.stderr
    numbered = r"^ *1 +7 +[\d.]+ +0\.03333 +0\.5 +0 +(\d+) +(\d+) +finished$"
    found = re.search(numbered, done.stderr, re.M)
    assert found is not None, "the script's own number wins: " + done.stderr
    assert int(found[2]) > 10 and 99 <= int(found[1]) + int(found[2]) <= 101
    assert done.stdout.count("report(0.25): the step is a whole number") == 2
    assert done.stdout.count("report('7'): the step is a whole number") == 2


def test_progress_lines_come_every_few_seconds(bench: Workbench) -> None:
    began_s = time.monotonic()
    with bench.started("run", "-n", "2", bench.script(_REPORTING), "0.1", "-1", "go") as launcher:
        said = read_until(launcher.stderr, "paceline: step")
        (bench.path / "go").touch()
        assert launcher.stderr is not None
        said += launcher.stderr.read()
    lines = [line for line in said.splitlines() if line.startswith("paceline: step")]
    assert 1 <= len(lines) <= (time.monotonic() - began_s) / PLAIN_EVERY_S, said
    assert re.match(r"paceline: steps? .* steps/s, loss 0\.\d+", lines[0])


def test_the_failure_report_comes_after_the_summary(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_REPORTING), "0.01", "1")
    assert done.returncode == 5
    table, report = done.stderr.index(" steps/s"), done.stderr.index("rank 1 failed first")
    assert table < report
    assert re.search(r"^ *1 +10 .* failed: exit code 5$", done.stderr, re.M), done.stderr


def test_a_terminal_shows_a_live_table(bench: Workbench) -> None:
    screen = _on_terminal(bench, "100", _REPORTING, "0.02", "-1", until="running")
    assert re.search(r"\[0\] \x1b\[0mlast line", screen), "only the prefix is coloured"
    plain = _without_sequences(screen)
    assert "running" in plain, "the table while the job ran"
    assert re.search(r"\x1b\[\d+A\x1b\[J", screen), "it was redrawn in place"
    assert plain.count("last line of 0") == 1
    assert "\x1b[?25h" in screen, "the cursor was given back"
    end = plain[plain.rindex("rank  ") :]
    assert "finished" in end and "2 ranks finished in" in end


# As the training hooks tell it: rank 1 waits for its loader, rank 0 for rank 1.
_TIMED = """
    import os, sys, time
    from paceline.control.client.agent import Agent
    from paceline.control.transport.auth import load_secret
    from paceline.runtime.config import job_env
    from paceline.observe.telemetry.clock import now_s
    from paceline.observe.telemetry.events import ProgressReport
    from paceline.observe.telemetry.step_times import StepTimes
    from paceline.observe.telemetry.traffic import Traffic

    env = job_env()
    secret = load_secret(env.secret_file)
    agent = Agent.connect(env.coordinator, secret, env.job_id, env.rank, "worker")
    for step in range(1, 21):
        time.sleep(0.02)
        while step == 20 and sys.argv[1:] and not os.path.exists(sys.argv[1]):
            time.sleep(0.02)
        times = StepTimes(step, now_s(), 0.1, 0.06 * env.rank, 0.05 * (1 - env.rank), 32)
        values = {"loss": 1 / step, "lr": 0.001, "accuracy": 0.5, "done %": 5.0 * step}
        sent = Traffic(step, step * 250_000, 0, 2.5e5, 0.1 * step, 0.0)
        agent.report(ProgressReport(env.rank, step, values, traffic=sent, steps=(times,)))
    agent.close()
"""


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (40, "rank  step  samples/s  loss  wait %"),
        (200, "rank   step   samples/s  loss   accuracy      lr   input %   wait %   MB/s   state"),
    ],
)
def test_a_narrow_terminal_gets_what_fits(bench: Workbench, columns: int, titles: str) -> None:
    screen = _on_terminal(bench, str(columns), _TIMED, until=r" +".join(titles.split()))
    lines = _without_sequences(screen).replace("\r", "").split("\n")
    assert all(len(line) <= columns for line in lines), lines
    assert any(line.split() == titles.split() for line in lines), lines
    rows = [line for line in lines if re.match(r" *1 +20 +\d+ +0\.05 ", line)]
    assert rows, "numbers are whole: " + screen
    sentence = " ".join(line.strip() for line in lines)
    assert "slowest: worker 1, which takes 2.0 times as long per step as the" in sentence
    assert "the other workers waited 50 % of the time for it" in sentence


def test_the_summary_names_the_slowest_worker_in_one_line(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_TIMED))
    assert done.returncode == 0, done.stderr
    head = r"^paceline: script\.py: 20 steps, 10\.0 steps/s, 640 samples/s, loss 0\.05$"
    assert re.search(head, done.stderr, re.M), done.stderr
    shares = r"^ *1 +20 +320 +0\.05 +0\.5 +0\.001 +60 +40 +0 +finished$"
    assert re.search(shares, done.stderr, re.M), done.stderr
    assert (
        len(re.findall(r"^paceline: slowest: worker 1, .* loader workers", done.stderr, re.M)) == 1
    )


def _on_terminal(bench: Workbench, columns: str, text: str, *arguments: str, until: str) -> str:
    """Run a script; its last step comes when this is on the screen."""
    script = bench.script(text)
    main, side = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "2", script, *arguments, "go"],
        cwd=bench.path,
        env={**bench.environ, "TERM": "xterm", "COLUMNS": columns, "LINES": "30"},
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=side,
    ) as launcher:
        os.close(side)
        screen = _read_all(main, until, bench.path / "go")
    os.close(main)
    assert launcher.returncode == 0, screen
    return screen


def _without_sequences(screen: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)


def _read_all(fd: int, until: str, go: Path) -> str:
    data = b""
    try:
        while piece := os.read(fd, 65536):
            data += piece
            if re.search(until, _without_sequences(data.decode(errors="replace"))):
                go.touch()
    except OSError:  # the kernel's way of saying that the far end is closed
        pass
    return data.decode(errors="replace")
