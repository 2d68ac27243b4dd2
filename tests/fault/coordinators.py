"""A coordinator in a process of its own, to be killed and started again; members in threads."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from paceline.control.client.agent import Agent
from paceline.control.client.operator import Operator
from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.transport.auth import create_secret_file, load_secret
from paceline.control.transport.sockets import join_address, listen_tcp
from paceline.runtime.coordinator_main import arguments

JOB = "restarted"

# Runs the coordinator, and kills it at a chosen point of its n-th write to the journal.
DYING = """
import os, signal, sys
from paceline.control.coordinator import journal
from paceline.runtime import coordinator_main

point, left = sys.argv.pop(1), int(sys.argv.pop(1))
write, sync = journal._write, os.fsync

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying_write(fd, data):
    global left
    left -= 1
    if left == 0 and point == "before":
        die()
    if left == 0 and point == "torn":
        write(fd, data[: len(data) // 2])
        die()
    write(fd, data)
    if left == 0 and point == "written":
        die()

def dying_sync(fd):
    sync(fd)
    if left == 0 and point == "synced":
        die()

journal._write, os.fsync = dying_write, dying_sync
sys.exit(coordinator_main.main())
"""
POINTS = ("before", "torn", "written", "synced")


def eventually(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def member(rank, role="worker", number=None):
    number = rank if number is None else number
    return Member(rank, role, "h", "h", 1000 + rank, number, "", "", number)


class Coordination:
    """What the launcher does: it holds the socket, and starts the coordinator on it."""

    def __init__(self, directory: Path, policy: Policy, stack: contextlib.ExitStack) -> None:
        self.policy, self.journal = policy, directory / "journal"
        secret_file = create_secret_file(directory)
        self.secret = load_secret(secret_file)
        listener = listen_tcp("127.0.0.1")
        self.address = join_address("127.0.0.1", listener.getsockname()[1])
        self._fd = os.dup(listener.fileno())
        listener.close()
        stack.callback(os.close, self._fd)
        self._words = arguments(
            job_id=JOB,
            secret_file=str(secret_file),
            journal=str(self.journal),
            policy=policy,
            join_timeout_s=60.0,
        )
        self._stack = stack
        self.process: subprocess.Popen | None = None
        self.died_with: int | None = None  # status of the one that was to kill itself
        stack.callback(self.kill)

    def start(self, dies: tuple[str, int] | None = None, room_bytes: int | None = None) -> None:
        """Start it; `dies`: at which point of which write it kills itself.

        `room_bytes`: so large its files may become, as if the disk were full then.
        """
        limit = (room_bytes, room_bytes)
        program = (
            ["-m", "paceline.runtime.coordinator_main"]
            if dies is None
            else ["-c", DYING, *map(str, dies)]
        )
        self.process = subprocess.Popen(
            [sys.executable, *program, *self._words, str(self._fd)],
            pass_fds=(self._fd,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE if room_bytes else None,
            text=True,
            preexec_fn=room_bytes and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)),
        )

    def kill(self) -> None:
        """SIGKILL, if it still runs; wait for its end."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def restart_when_dead(self) -> threading.Thread:
        """Start a healthy one as soon as the present one has died, as the launcher does."""

        def watch() -> None:
            self.died_with = self.process.wait()
            self.start()

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def agent(self, rank: int, role: str = "worker") -> Agent:
        agent = Agent.connect(
            self.address, self.secret, JOB, rank, role, is_lasting=True, timeout_s=60.0
        )
        self._stack.callback(agent.thread.stop)
        return agent

    def operator(self, **options) -> Operator:
        patience = {"timeout_s": 60.0, **options}  # its process may only just have been started
        operator = Operator.connect(self.address, self.secret, JOB, **patience)
        self._stack.callback(operator.close)
        return operator

    def join_all(self) -> dict[int, Agent]:
        """Form the job."""
        workers, servers = self.policy.num_workers, self.policy.num_servers
        members = [member(rank) for rank in range(workers)]
        members += [member(workers + number, "server", number) for number in range(servers)]
        agents = {one.rank: self.agent(one.rank, one.role) for one in members}
        threads = [
            threading.Thread(target=agents[one.rank].join, args=(one, 60)) for one in members
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(agent.membership is not None for agent in agents.values())
        return agents
