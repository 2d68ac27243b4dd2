"""How jobs end: Ctrl-C, SIGTERM, and a launcher that is killed without a chance to clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from run_support import COMMAND, END_S, Workbench, is_alive, wait_until


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


# Each rank writes its own pid and those of its children: one in its process group, and one that
# left for a session of its own, as a daemon does.
_FAMILY = """
    import os, pathlib, signal, subprocess, sys, time
    def is_told(*_):
        pathlib.Path("told-" + os.environ["RANK"]).write_text("yes\\n")
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as its children do, which inherit it
    idle = [sys.executable, "-c", "import time; time.sleep(100)"]
    near = subprocess.Popen(idle)
    far = subprocess.Popen(idle, start_new_session=True)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, is_told)
    name = "pids-" + os.environ["RANK"]
    pathlib.Path(name).write_text(f"{os.getpid()} {near.pid} {far.pid}\\n")
    while "finish" not in sys.argv:
        time.sleep(0.05)
"""


def _family(bench: Workbench, ranks: int) -> list[str]:
    return " ".join(bench.wait_for_files(*(f"pids-{rank}" for rank in range(ranks)))).split()


def _all_gone(pids: list[str]) -> bool:
    return not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("number", "code", "mood"),
    [(signal.SIGTERM, 143, "stubborn"), (signal.SIGINT, 130, "")],
)
def test_signals_end_everything_soon(
    bench: Workbench, number: signal.Signals, code: int, mood: str
) -> None:
    with bench.started("run", "-n", "2", bench.script(_FAMILY), mood) as launcher:
        pids = _family(bench, 2)
        asked_s = time.monotonic()
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=END_S)
        took_s = time.monotonic() - asked_s
    assert launcher.returncode == code
    assert took_s < 20.0, "the user is promised 5 s on a machine that is not full of other tests"
    assert f"stopped by {number.name}" in errors
    assert _all_gone(pids) and bench.left_behind() == []


def test_the_second_ctrl_c_does_not_wait(bench: Workbench) -> None:
    options = ("-n", "2", "--grace", "60")
    with bench.started("run", *options, bench.script(_FAMILY), "stubborn") as launcher:
        pids = _family(bench, 2)
        launcher.send_signal(signal.SIGINT)
        bench.wait_for_files("told-0", "told-1")  # two signals at once would be one
        launcher.send_signal(signal.SIGINT)
        asked_s = time.monotonic()
        _, errors = launcher.communicate(timeout=END_S)
        assert time.monotonic() - asked_s < 30.0, "it sat out the grace period of 60 s"
    assert launcher.returncode == 130
    assert "did not end on SIGTERM" not in errors
    assert _all_gone(pids) and bench.left_behind() == []


def test_what_a_rank_leaves_behind_ends_with_the_job(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_FAMILY), "finish")
    assert (done.returncode, done.stderr) == (0, "")
    assert _all_gone(_family(bench, 2))


def test_nothing_survives_kill_9_of_the_launcher(bench: Workbench) -> None:
    with bench.started("run", "-n", "2", bench.script(_FAMILY), "stubborn") as launcher:
        pids = _family(bench, 2)
        launcher.kill()
        wait_until(lambda: _all_gone(pids), within_s=30.0)
        wait_until(lambda: bench.left_behind() == [], within_s=30.0)


def _guard_of(job_directory: str) -> str:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if any(w.endswith("guard_main.py") for w in words) and any(
                job_directory in w for w in words
            ):
                return entry.name
    raise AssertionError("no guard process")


def test_ranks_die_with_the_launcher_even_without_the_guard(bench: Workbench) -> None:
    with bench.started("run", "-n", "2", bench.script(_FAMILY), "stubborn") as launcher:
        pids = _family(bench, 2)
        directory = bench.left_behind()[0]
        os.kill(int(_guard_of(directory)), signal.SIGKILL)
        launcher.kill()
        ranks = [pids[0], pids[3]]
        wait_until(lambda: _all_gone(ranks), within_s=30.0)
        for orphan in (*pids[1:3], *pids[4:6]):  # nobody was left to end these
            os.kill(int(orphan), signal.SIGKILL)
    assert bench.left_behind() == [directory]
    assert bench.run("run", bench.script("pass")).returncode == 0
    assert bench.left_behind() == [], "the next launcher sweeps"


def test_a_living_job_is_not_swept(bench: Workbench) -> None:
    with bench.started("run", bench.script(_FAMILY)) as launcher:
        _family(bench, 1)
        before = bench.left_behind()
        assert bench.run("run", bench.script("pass", "other.py")).returncode == 0
        assert bench.left_behind() == before != []
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(END_S) == 143


def test_ctrl_c_works_while_nobody_reads_the_output(bench: Workbench) -> None:
    script = bench.script("""
        import os, pathlib
        pathlib.Path("started").write_text(f"{os.getpid()}\\n")
        written, lines = 0, (b"x" * 1000 + b"\\n") * 32
        while True:
            written += os.write(1, lines)
            pathlib.Path("written").write_text(f"{written}\\n")
    """)
    read_end, write_end = os.pipe()
    launcher = subprocess.Popen(
        [*COMMAND, "run", script],
        cwd=bench.path,
        env=bench.environ,
        stdout=write_end,
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    try:
        (pid,) = bench.wait_for_files("started")
        time.sleep(1.5)  # let every buffer on the way fill up
        (written,) = bench.wait_for_files("written")
        assert int(written) < 32 << 20, "the rank must wait, the launcher must not hoard"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(END_S) == 130
        assert not is_alive(pid) and bench.left_behind() == []
    finally:
        os.close(read_end)
        launcher.kill()
        launcher.wait()
