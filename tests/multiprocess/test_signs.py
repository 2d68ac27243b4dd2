"""What the kernel shows of a process: stopped since when, and killed for its memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from run_support import memory_cgroup, wait_until

from paceline.launcher.processes.monitor import ProcessMonitor
from paceline.launcher.processes.process import AdoptedProcess, ProcessOutput, RankProcess
from paceline.runtime.process_names import ProcessName


def _start(program: str) -> RankProcess:
    argv = [sys.executable, "-c", program]
    return RankProcess.start(ProcessName(0, 0), argv, dict(os.environ), ProcessOutput.pipes())


def _diagnosis(monitor: ProcessMonitor, process: RankProcess) -> str:
    wait_until(process.check_ended)
    words = monitor.diagnosis(process)
    process.release()
    return words


def test_a_stopped_process_is_seen_and_since_when() -> None:
    process, monitor = _start("import time; time.sleep(60)"), ProcessMonitor()
    monitor.add(process)
    assert monitor.poll([process], 1.0) == {0: None}
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(process.is_frozen)
    assert monitor.poll([process], 2.0) == {0: 0.0}
    assert monitor.poll([process], 5.5) == {0: 3.5}
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: not process.is_frozen())
    assert monitor.poll([process], 6.0) == {0: None}
    os.kill(process.pid, signal.SIGKILL)
    assert _diagnosis(monitor, process).startswith("killed by signal 9")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11 (SIGSEGV)"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_other_ends_are_named(program: str, words: str) -> None:
    process, monitor = _start(program), ProcessMonitor()
    monitor.add(process)
    assert _diagnosis(monitor, process) == words


@pytest.mark.root
@pytest.mark.serial
def test_a_process_is_diagnosed_by_its_own_memory_group(tmp_path: Path) -> None:
    group = memory_cgroup(limit_bytes=96 << 20)
    if group is None:
        pytest.skip("no writable memory control group here")
    eat = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    eat += "x = [bytearray(8 << 20) for _ in range(64)]"
    process, monitor = _start(eat), ProcessMonitor()
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        monitor.add(process)
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 60
        while not process.check_ended() and time.monotonic() < deadline:
            monitor.poll([process], time.monotonic())
            time.sleep(0.05)
        words = monitor.diagnosis(process)
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
    os.set_blocking(middle.output.stdout_fd, True)
    pid = int(os.read(middle.output.stdout_fd, 100))
    grandchild = AdoptedProcess(ProcessName(1, 1), pid, ProcessOutput.pipes())
    assert not grandchild.check_ended() and grandchild.is_running
    grandchild.signal_group(signal.SIGKILL)
    wait_until(grandchild.check_ended)
    assert str(grandchild.status) == "ended with unknown status"
    assert not grandchild.status.is_success and grandchild.status.shell_code == 1
    grandchild.release()
    middle.signal_group(signal.SIGKILL)
    wait_until(middle.check_ended)
    middle.release()
