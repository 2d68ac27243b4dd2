"""The guard of an agent ends an agent that stays stopped; a launcher may be stopped."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

# Starts a guard and a child of the job, then prints the child's pid and waits.
STARTER = """
import os, pathlib, subprocess, sys, time
from paceline.launcher.processes.guard import Guard
guard = Guard("", pathlib.Path(sys.argv[1]), stopped_s=int(sys.argv[2]))
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
guard.watch(child.pid)
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
guard.end()
"""


def start(directory: Path, stopped_s: int) -> tuple[subprocess.Popen[str], int]:
    directory.mkdir()
    command = [sys.executable, "-c", STARTER, str(directory), str(stopped_s)]
    pipes = subprocess.PIPE
    starter = subprocess.Popen(command, stdin=pipes, stdout=pipes, text=True)
    assert starter.stdout is not None
    return starter, int(starter.stdout.readline())


def test_a_stopped_agent_is_killed_with_what_it_started(tmp_path: Path) -> None:
    agent, child = start(tmp_path / "agent", stopped_s=1)
    launcher, _ = start(tmp_path / "launcher", stopped_s=0)
    handle = os.pidfd_open(child)
    os.kill(agent.pid, signal.SIGSTOP)
    os.kill(launcher.pid, signal.SIGSTOP)
    agent.communicate(timeout=20)
    assert agent.returncode == -signal.SIGKILL
    assert select.select([handle], [], [], 20)[0], "the child of the agent is still there"
    os.close(handle)
    assert launcher.poll() is None
    os.kill(launcher.pid, signal.SIGCONT)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 0
