"""Versions that are followed: told as they come, until there can be no more."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import paceline as pl
from paceline.errors import PeerTimeout, ServerLost
from paceline.ps.client import session
from support import receive, report, run_ranks, started

BIG = 100_003  # cut over two servers
everywhere = pytest.mark.parametrize(
    "hosts", [[0, 0, 0, 0, 0], [0, 0, 1, 0, 1]], ids=["one host", "two hosts"]
)


def evaluate(group, pace, steps):
    client, ones = pl.ps.Client(pace), np.ones(BIG, np.float32)
    workers = [0, 1]
    if pl.rank() in workers:
        client.init("w", np.zeros(BIG, np.float32), lr=1.0, workers=workers)
    group.barrier()
    if pl.rank() in workers:
        for _ in range(steps):
            client.push_pull("w", ones).wait()
        return client.version("w")
    seen = []
    for version in client.subscribe("w"):  # ends when both have left
        value = client.pull("w").wait()
        seen.append((version, float(value[0]), float(value[-1])))
    return seen


@everywhere
@pytest.mark.parametrize("pace", ["ps", "async"])
def test_an_evaluator_follows_until_the_workers_have_left(hosts, pace):
    _, _, seen = run_ranks(3, evaluate, pace, 10, servers=2, hosts=hosts)
    versions = [version for version, _, _ in seen]
    assert versions == sorted(set(versions))
    assert versions[-1] == (10 if pace == "ps" else 20)
    for version, first, last in seen:  # every part is at least as new as the version says
        assert -first >= version and -last >= version
    assert -seen[-1][1] == versions[-1]


def turns(group):
    """Rank 1 waits before rank 0 pushes, and so hears of every version."""
    client, zeros = pl.ps.Client("async"), np.zeros(3, np.float32)
    client.init("w", zeros, lr=1.0, workers=[0])
    subscription = client.subscribe("w", after=client.version("w"))
    group.barrier()
    if pl.rank() == 0:
        for step in range(5):
            receive()
            assert client.push("w", zeros).wait().version == step + 1
        assert subscription.wait() == 5  # what came meanwhile is not queued
        with pytest.raises(PeerTimeout, match=r"key 'w' has no version above 5 yet, after 0.05 s"):
            subscription.wait(timeout_s=0.05)
        client.push("w", zeros).wait()
        assert subscription.wait(timeout_s=30) == 6  # what was asked before the time was over
        return
    for _ in range(5):
        report("waits now")
        report(subscription.wait())
    assert subscription.wait() == 6
    assert subscription.wait() is None and subscription.wait() is None


def test_a_version_is_told_when_it_comes():
    with started(2, turns, servers=1) as ranks:
        for step in range(5):
            assert ranks.receive(1) == "waits now"
            ranks.send(0, "go")
            assert ranks.receive(1) == step + 1
        ranks.values()


def follow_in_a_thread(group, ending):
    client, ones = pl.ps.Client("ssp:1"), np.ones(3, np.float32)
    client.init("w", np.zeros(3, np.float32), lr=1.0)
    heard: list[int] = []
    has_heard = threading.Event()
    subscription = client.subscribe("w", after=0)

    def listen() -> None:
        for version in subscription:
            assert float(-client.peek("w").wait()[0]) >= version
            heard.append(version)
            has_heard.set()

    thread = threading.Thread(target=listen)
    thread.start()
    group.barrier()
    for _ in range(30):
        client.push_pull("w", ones).wait()
    assert has_heard.wait(timeout=50)
    group.barrier()
    if ending == "closed":
        subscription.close()
    else:
        pl.shutdown()
    thread.join(timeout=50)
    assert not thread.is_alive()
    return heard


@pytest.mark.parametrize("ending", ["closed", "left"])
def test_a_thread_follows_while_its_worker_pushes(ending):
    for heard in run_ranks(2, follow_in_a_thread, ending, servers=1, hosts=[0, 1, 0]):
        assert heard and heard == sorted(set(heard)) and heard[-1] <= 60


def follow_a_server_that_dies(group):
    client = pl.ps.Client("async")
    client.init("w", np.zeros(3, np.float32), lr=1.0)
    subscription = client.subscribe("w", after=0)
    report("following")
    with pytest.raises(ServerLost, match=r"server 0 .* It held w \[0:3\]"):
        subscription.wait()


def test_a_server_that_dies_ends_a_subscription_with_its_name():
    with started(1, follow_a_server_that_dies, servers=1) as ranks:
        ranks.receive(0)
        ranks.kill(1)
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.error is None, outcome


def ask_much_behind_a_follower(group):
    client = pl.ps.Client("async")
    client.init("w", np.zeros(4, np.float32), lr=1.0)
    (link,) = session.current().links
    waiting = client._key("w").remote.follow(1 << 40)  # a version that nobody makes
    for _ in range(1000):
        client.peek("w").wait()
    kept = link._fixed._pair._posted.count()
    return kept, [work.done() for work in waiting]


def test_a_reply_that_does_not_come_keeps_no_memory_of_those_that_came():
    ((kept, done),) = run_ranks(1, ask_much_behind_a_follower, servers=1)
    assert kept < 300 and done == [False]
