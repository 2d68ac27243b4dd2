"""A secret, a running coordinator, members and strangers for the tests of the control plane."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest

from paceline.control.client.agent import Agent
from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.member import Member
from paceline.control.transport.sockets import split_address

JOB = "job-1"
SECRET = bytes(range(32))


def member(rank: int, *, hostname: str = "here", unix: str = "", tcp: str = "") -> Member:
    return Member(
        rank=rank,
        role="worker",
        host_id="host",
        hostname=hostname,
        pid=os.getpid(),
        local_rank=rank,
        unix=unix,
        tcp=tcp,
    )


def eventually(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Cluster:
    """A coordinator and the agents of this test; everything is closed at its end."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.thread: CoordinatorThread
        self.address = ""

    def start(self, world_size: int, **options) -> Cluster:
        self.thread = CoordinatorThread(Coordinator(JOB, SECRET, world_size, **options))
        self._stack.callback(self.thread.stop)
        self.address = self.thread.start()
        return self

    @property
    def coordinator(self):
        return self.thread.coordinator

    def agent(self, rank: int, **options) -> Agent:
        agent = Agent.connect(self.address, SECRET, JOB, rank, **options)
        self._stack.callback(agent.close)
        return agent

    @staticmethod
    def cut(agent: Agent) -> None:
        """End an agent's connection without a word, as the death of its process does."""
        agent.thread.post(agent._connection.drop)

    def stranger(self) -> socket.socket:
        """A connection that has not proved anything."""
        sock = socket.create_connection(split_address(self.address), timeout=10)
        self._stack.callback(sock.close)
        return sock


@pytest.fixture
def cluster():
    with contextlib.ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture
def make_member():
    return member


@pytest.fixture(name="eventually")
def _eventually():
    return eventually


@pytest.fixture
def secret() -> bytes:
    return SECRET


@pytest.fixture
def job_id() -> str:
    return JOB
