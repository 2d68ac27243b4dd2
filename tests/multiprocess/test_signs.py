"""What the kernel shows of a process: stopped since when, and killed for its memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from run_support import memory_cgroup, wait_until

from paceline.launcher.processes.exit_signs import Lookout
from paceline.launcher.processes.pipes import Outlet
from paceline.launcher.processes.process import AdoptedProcess, RankProcess
from paceline.runtime.process_names import Seat


def _start(program: str) -> RankProcess:
    argv = [sys.executable, "-c", program]
    return RankProcess.start(Seat(0, 0), argv, dict(os.environ), Outlet.pipes())


def _diagnosis(lookout: Lookout, process: RankProcess) -> str:
    wait_until(process.check_ended)
    words = lookout.diagnosis(process)
    process.release()
    return words


def test_a_stopped_process_is_seen_and_since_when() -> None:
    process, lookout = _start("import time; time.sleep(60)"), Lookout()
    lookout.know(process)
    assert lookout.look([process], 1.0) == {0: None}
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(process.is_frozen)
    assert lookout.look([process], 2.0) == {0: 0.0}
    assert lookout.look([process], 5.5) == {0: 3.5}
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: not process.is_frozen())
    assert lookout.look([process], 6.0) == {0: None}
    os.kill(process.pid, signal.SIGKILL)
    assert _diagnosis(lookout, process).startswith("killed by signal 9")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11 (SIGSEGV)"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_other_ends_are_named(program: str, words: str) -> None:
    process, lookout = _start(program), Lookout()
    lookout.know(process)
    assert _diagnosis(lookout, process) == words


@pytest.mark.root
@pytest.mark.serial
def test_a_process_is_diagnosed_by_its_own_memory_group(tmp_path: Path) -> None:
    group = memory_cgroup(limit_bytes=96 << 20)
    if group is None:
        pytest.skip("no writable memory control group here")
    eat = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    eat += "x = [bytearray(8 << 20) for _ in range(64)]"
    process, lookout = _start(eat), Lookout()
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        lookout.know(process)
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 60
        while not process.check_ended() and time.monotonic() < deadline:
            lookout.look([process], time.monotonic())
            time.sleep(0.05)
        words = lookout.diagnosis(process)
        process.release()
    finally:
        group.rmdir()
    assert words == "killed by signal 9, memory cgroup limit 96 MiB reached"


def test_an_adopted_process_is_pinned_and_its_status_unknown() -> None:
    middle = _start(
        "import subprocess, sys, time;"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid,"
        " flush=True); time.sleep(60)"
    )
    os.set_blocking(middle.outlet.stdout_fd, True)
    pid = int(os.read(middle.outlet.stdout_fd, 100))
    grandchild = AdoptedProcess(Seat(1, 1), pid, Outlet.pipes())
    assert not grandchild.check_ended() and grandchild.is_running
    grandchild.signal_group(signal.SIGKILL)
    wait_until(grandchild.check_ended)
    assert str(grandchild.status) == "ended, how is not known"
    assert not grandchild.status.is_success and grandchild.status.shell_code == 1
    grandchild.release()
    middle.signal_group(signal.SIGKILL)
    wait_until(middle.check_ended)
    middle.release()
