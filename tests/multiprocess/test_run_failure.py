"""What the user is told when a rank fails, and the exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_support import COMMAND, END_S, Workbench, memory_cgroup


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def test_the_first_failing_rank_is_named_with_its_traceback(bench: Workbench) -> None:
    script = bench.script("""
        import os, time
        if os.environ["RANK"] == "2":
            raise ValueError("no such file: weights.pt")
        time.sleep(60)
    """)
    done = bench.run("run", "-n", "4", "--log-dir", "logs", script)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("paceline: rank 2 failed first") :]
    assert "exit code 1" in report and "logs/rank-2.log" in report
    assert "  | ValueError: no such file: weights.pt" in report
    assert "paceline: ranks 0-1, 3: stopped because rank 2 failed" in report
    assert bench.left_behind() == []


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV (segmentation fault)"),
        ("os.kill(os.getpid(), 11)", 139, '  |   File "'),
        ("os.kill(os.getpid(), 15)", 143, "killed by SIGTERM"),
        ("sys.exit('a message')", 1, "  | a message"),
    ],
)
def test_the_exit_code_is_the_scripts(
    bench: Workbench, statement: str, code: int, words: str
) -> None:
    done = bench.run("run", "-n", "1", bench.script(f"import os, sys\n{statement}"))
    assert done.returncode == code
    assert words in done.stderr
    assert "out of memory" not in done.stderr, "said without evidence"


# For scripts whose ranks end one after the other, however long each takes to start.
_OTHERS = """
    import os, pathlib, time

    def is_here():
        pid = pathlib.Path("new-" + os.environ["RANK"])
        pid.write_text(str(os.getpid()))
        pid.rename("pid-" + os.environ["RANK"])

    def wait_for(rank, state):  # as the kernel names it: "T" is stopped, "Z" has ended
        pid = pathlib.Path(f"pid-{rank}")
        while not pid.exists():
            time.sleep(0.01)
        stat = pathlib.Path(f"/proc/{pid.read_text()}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != state:
            time.sleep(0.01)
"""


def test_a_rank_that_lost_its_peer_is_not_the_first_cause(bench: Workbench) -> None:
    bench.script(_OTHERS, "others.py")
    script = bench.script("""
        import os, time
        import others
        from paceline.errors import PeerLost
        rank = os.environ["RANK"]
        if rank == "0":
            others.is_here()
            raise PeerLost("rank 1 ended during all_reduce #4", rank=1)
        if rank == "1":
            others.wait_for(0, "Z")
            time.sleep(0.2)   # a slow end of the interpreter
            raise KeyError("the cause")
        time.sleep(60)
    """)
    done = bench.run("run", "-n", "3", script)
    assert "paceline: rank 1 failed first: exit code 1" in done.stderr
    assert "| KeyError: 'the cause'" in done.stderr
    lost = "rank 0: stopped because rank 1 failed (paceline.errors.PeerLost: rank 1 ended"
    assert lost in done.stderr


def test_a_lost_peer_without_another_failure_is_reported(bench: Workbench) -> None:
    script = bench.script("""
        import os, time
        from paceline.errors import PeerTimeout
        if os.environ["RANK"] == "0":
            raise PeerTimeout("rank 1 has not answered", rank=1)
        time.sleep(60)
    """)
    done = bench.run("run", "-n", "2", script)
    assert done.returncode == 1
    assert "paceline: rank 0 failed first" in done.stderr
    assert "| paceline.errors.PeerTimeout: rank 1 has not answered" in done.stderr


def test_a_frozen_rank_is_called_frozen(bench: Workbench) -> None:
    bench.script(_OTHERS, "others.py")
    script = bench.script("""
        import os, signal, sys
        import others
        if os.environ["RANK"] == "1":
            others.is_here()
            os.kill(os.getpid(), signal.SIGSTOP)
        others.wait_for(1, "T")
        sys.exit(3)
    """)
    done = bench.run("run", "-n", "2", script)
    assert done.returncode == 3
    assert "rank 1: stopped because rank 0 failed; it was frozen" in done.stderr


def test_finishing_early_is_no_failure(bench: Workbench) -> None:
    script = bench.script("""
        import os, time
        if os.environ["RANK"] == "0":
            time.sleep(0.6)
            print("done")
    """)
    done = bench.run("run", "-n", "3", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] done\n", "")


def test_a_rank_that_finished_is_not_called_stopped(bench: Workbench) -> None:
    bench.script(_OTHERS, "others.py")
    script = bench.script("""
        import os, sys
        import others
        if os.environ["RANK"] == "0":
            others.is_here()
        else:
            others.wait_for(0, "Z")
            sys.exit(4)
    """)
    done = bench.run("run", "-n", "2", script)
    assert done.returncode == 4
    assert "paceline: rank 0: finished" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "script.py"], "-n 0: expected a number from 1"),
        (["-n", "-3", "script.py"], "-n -3: expected a number from 1"),
        (["-n", "two", "script.py"], "-n"),
        (["missing.py"], "missing.py: no such script"),
        (["script"], "did you mean script.py?"),
        (["json"], "-m json"),
        (["."], ".: is a directory"),
        (["-m", "no_such_module"], "no module named 'no_such_module'"),
        (["-m", "script.py"], "leave out -m"),
        (["--env", "A", "script.py"], "write --env NAME=VALUE"),
        (["--env", "=1", "script.py"], "write --env NAME=VALUE"),
        (["--env", "RANK=1", "script.py"], "the launcher sets RANK"),
        (["--env", "PACELINE_TIMEOUT_S=soon", "script.py"], "PACELINE_TIMEOUT_S"),
        (["--threads-per-worker", "0", "script.py"], "--threads-per-worker 0"),
        (["--metrics-port", "70000", "script.py"], "--metrics-port 70000: expected"),
        (["--no-such-option", "script.py"], "--no-such-option"),
        ([], "paceline run --help"),
    ],
)
def test_a_wrong_command_line_gets_one_line_and_code_2(
    bench: Workbench, arguments: list[str], words: str
) -> None:
    bench.script("raise SystemExit('must not run')")
    done = bench.run("run", *arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.startswith("paceline: error: ")
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


_EAT = """
    import os, sys
    eaten = []
    while True:
        eaten.append(bytearray(os.urandom(1 << 20) * 8))
"""


@pytest.mark.root
@pytest.mark.serial
def test_out_of_memory_is_said_with_evidence(bench: Workbench) -> None:
    group = memory_cgroup(limit_bytes=96 << 20)
    if group is None:
        pytest.skip("no writable memory control group here")
    command = [*COMMAND, "run", "-n", "1", bench.script(_EAT)]
    join = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write('0');"
    join += f"os.execv({sys.executable!r}, {[sys.executable, *command[1:]]!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", join],
            cwd=bench.path,
            env=bench.environ,
            capture_output=True,
            text=True,
            timeout=END_S,
            check=False,
        )
    finally:
        group.rmdir()
    assert done.returncode == 137
    assert "killed by SIGKILL" in done.stderr and "possibly out of memory" in done.stderr
    assert "limit 96 MiB, peak 96 MiB" in done.stderr
