"""An agent outlives its coordinator, and its failures come quickly and say what they are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from paceline.control.client.agent import Agent
from paceline.control.transport.sockets import listen_tcp
from paceline.errors import AuthError, PeerLost, UsageError
from paceline.observe.telemetry.events import Note

SERVE = """
import sys
from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
print(CoordinatorThread(Coordinator("job-1", bytes(range(32)), 1)).start(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process():
    """A coordinator in a process of its own, which a test may kill; yields (process, address)."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield child, child.stdout.readline().strip()
        child.kill()


def test_a_killed_coordinator_fails_pending_and_later_calls(
    process, make_member, secret, job_id, eventually
):
    child, address = process
    agent = Agent.connect(address, secret, job_id, 0)
    membership = agent.join(make_member(0), 20)
    failures = []

    def wait():
        try:
            agent.store_get("never", 60)
        except PeerLost as error:
            failures.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: agent._connection._asked)
    child.send_signal(signal.SIGKILL)
    waiting.join()
    assert f"rank 0: coordinator {address}: it closed the connection or ended" in failures[0]
    with pytest.raises(PeerLost, match="coordinator"):
        agent.store_set("k", b"v")
    assert agent.membership == membership
    agent.report(Note(0, "nobody listens"))  # dropped, not an error
    agent.leave()
    agent.close()


def test_closing_twice_and_using_a_closed_agent(cluster):
    agent = cluster.start(1).agent(0)
    agent.close()
    agent.close()
    agent.report(Note(0, "late"))
    with pytest.raises(PeerLost, match="this member has left the job"):
        agent.store_num_keys()


def test_closing_ends_a_call_of_another_thread(cluster, eventually):
    agent = cluster.start(1).agent(0)
    failures = []

    def wait():
        try:
            agent.store_get("never", 60)
        except (PeerLost, UsageError) as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: agent._connection._asked)
    agent.close()
    waiting.join()
    assert len(failures) == 1


def test_threads_have_names_and_end(cluster):
    before = set(threading.enumerate())  # other tests of this process may have left some
    agent = cluster.start(1).agent(0)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert {"paceline-control", "paceline-coordinator"} <= names
    agent.close()
    cluster.thread.stop()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith(("paceline", "asyncio")) for name in names)


def test_a_failed_connect_leaves_no_thread(cluster, job_id):
    with pytest.raises(AuthError):
        Agent.connect(cluster.start(1).address, b"x" * 32, job_id, 0)
    assert "paceline-control" not in {thread.name for thread in threading.enumerate()}


@contextlib.contextmanager
def forked_child():
    """A forked child that does nothing, as a data loader's worker that waits for work."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(writable)
            os.read(readable, 1)
        finally:
            os._exit(0)
    os.close(readable)
    try:
        yield
    finally:
        os.close(writable)
        os.waitpid(child, 0)


def test_a_forked_child_keeps_neither_connection_nor_port(cluster, make_member, eventually):
    agent = cluster.start(1).agent(0)
    agent.join(make_member(0), 20)
    with forked_child():
        cluster.cut(agent)
        eventually(lambda: 0 in cluster.coordinator.lost)
        cluster.thread.stop()
        listen_tcp("127.0.0.1", int(cluster.address.rpartition(":")[2])).close()


def test_a_callback_that_waits_for_its_own_thread_is_told_so(cluster, make_member, eventually):
    cluster.start(2)
    agents = [cluster.agent(rank) for rank in range(2)]
    seen = []

    def ask(presence):
        try:
            agents[0].store_num_keys()
        except UsageError as error:
            seen.append(str(error))
            raise

    agents[0].on_presence = ask
    joining = threading.Thread(target=agents[1].join, args=(make_member(1), 20))
    joining.start()
    agents[0].join(make_member(0), 20)
    joining.join()
    agents[1].close()
    eventually(lambda: seen)
    assert "must not wait for that thread" in seen[0]
    assert agents[0].store_num_keys() == 0  # its own error did not cost it the connection
