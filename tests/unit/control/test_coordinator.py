"""Forming the job, and knowing who is there: real connections to a real coordinator."""

from __future__ import annotations

import os
import re
import threading

import pytest

from paceline.control.client.agent import Agent
from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
from paceline.errors import AuthError, ConnectError, PeerLost, PortInUse, RendezvousError
from paceline.observe.telemetry.events import Note, ProgressReport


def join_all(agents, make_member, timeout_s=20.0):
    """Join from one thread per agent; returns each one's membership or error, by position."""
    results = [None] * len(agents)

    def join(index, agent):
        try:
            results[index] = agent.join(make_member(agent._rank), timeout_s)
        except (RendezvousError, PeerLost) as error:
            results[index] = error

    threads = [threading.Thread(target=join, args=item) for item in enumerate(agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_receive_the_same_membership(cluster, make_member):
    cluster.start(3)
    agents = [cluster.agent(rank) for rank in (2, 0, 1)]
    memberships = join_all(agents, make_member)
    assert memberships[0] == memberships[1] == memberships[2] == cluster.coordinator.membership
    assert (memberships[0].generation, memberships[0].ranks) == (1, (0, 1, 2))
    assert agents[0].membership == memberships[0]


def test_the_later_claim_of_a_rank_is_refused_and_both_are_named(cluster, make_member, eventually):
    cluster.start(2)
    first, second, other = cluster.agent(0), cluster.agent(0), cluster.agent(1)
    waiting = threading.Thread(target=first.join, args=(make_member(0, hostname="a"), 20))
    waiting.start()
    eventually(lambda: cluster.coordinator.missing == (1,))
    with pytest.raises(RendezvousError, match=rf"rank 0 claimed twice \(a:{os.getpid()}, b:"):
        second.join(make_member(0, hostname="b"), 20)
    assert other.join(make_member(1), 20).member(0).hostname == "a"
    waiting.join()


def test_a_missing_rank_is_named_to_all_who_wait(cluster, make_member):
    cluster.start(4, join_timeout_s=1.5)  # for the second to come while the first waits
    errors = join_all([cluster.agent(0), cluster.agent(2)], make_member)
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert "ranks [1, 3] of 4" in str(error)
    with pytest.raises(RendezvousError, match=r"ranks \[1, 3\]"):  # too late
        cluster.agent(1).join(make_member(1), 20)


def test_a_members_own_patience_counts_too(cluster, make_member):
    agent = cluster.start(2).agent(0)
    with pytest.raises(RendezvousError, match=r"ranks \[1\] of 2"):
        agent.join(make_member(0), 0.3)


def test_who_waits_long_says_for_whom(cluster, make_member, capfd):
    cluster.start(4, join_timeout_s=4.0)
    join_all([cluster.agent(1), cluster.agent(3)], make_member)
    said = capfd.readouterr().err
    assert re.fullmatch(
        r"paceline: rank 1 waits for ranks 0, 2 to join \([234] s so far\)\n", said
    ), said


def test_a_rank_that_dies_while_waiting_may_be_started_again(cluster, make_member, eventually):
    cluster.start(2)
    first = cluster.agent(0)
    waiting = threading.Thread(target=join_all, args=([first], make_member))
    waiting.start()
    eventually(lambda: cluster.coordinator.missing == (1,))
    cluster.cut(first)
    waiting.join()
    eventually(lambda: cluster.coordinator.missing == (0, 1))
    memberships = join_all([cluster.agent(0), cluster.agent(1)], make_member)
    assert memberships[0] == memberships[1]


def test_a_rank_beyond_the_world_is_refused(cluster, make_member):
    with pytest.raises(RendezvousError, match=r"rank 5 .* not in 0..1"):
        cluster.start(2).agent(5).join(make_member(5), 20)


def test_nobody_joins_as_somebody_else(cluster, make_member):
    with pytest.raises(RendezvousError, match="authenticated as rank 1 asked to join as rank 0"):
        cluster.start(2).agent(1).join(make_member(0), 20)


@pytest.mark.parametrize(("secret", "job"), [(b"x" * 32, "job-1"), (bytes(range(32)), "job-2")])
def test_wrong_secret_or_job_is_an_auth_error(cluster, secret, job):
    address = cluster.start(2).address
    with pytest.raises(AuthError, match=rf"rank 1: coordinator {address}: .*job {job}"):
        Agent.connect(address, secret, job, 1)
    assert cluster.coordinator.missing == (0, 1)


def test_nobody_at_the_address(cluster, secret, job_id):
    address = cluster.start(1).address
    cluster.thread.stop()
    with pytest.raises(ConnectError, match=rf"coordinator {address}: .*tried \d+x in 0.3 s"):
        Agent.connect(address, secret, job_id, 0, timeout_s=0.3)


def test_a_second_coordinator_on_the_same_port_is_told_who_has_it(cluster):
    port = int(cluster.start(1).address.rpartition(":")[2])
    second = CoordinatorThread(Coordinator("other", bytes(32), 1))
    with pytest.raises(PortInUse, match=rf":{port} .*pid {os.getpid()}"):
        second.start("127.0.0.1", port)


def test_leaving_and_being_lost_are_told_apart(cluster, make_member, eventually):
    cluster.start(3)
    agents = [cluster.agent(rank) for rank in range(3)]
    join_all(agents, make_member)
    agents[1].leave()
    cluster.cut(agents[2])
    eventually(lambda: set(agents[0].presence) == {1, 2})
    assert {rank: p.state for rank, p in agents[0].presence.items()} == {1: "left", 2: "lost"}
    assert cluster.coordinator.left == {1}
    assert list(cluster.coordinator.lost) == [2]


def test_a_silent_member_is_reported_and_may_come_back(cluster, make_member, eventually):
    cluster.start(2, liveness_s=0.6)
    quick, slow = cluster.agent(0, heartbeat_s=0.1), cluster.agent(1, heartbeat_s=1.5)
    states = []
    quick.on_presence = lambda presence: states.append((presence.rank, presence.state))
    join_all([quick, slow], make_member)
    eventually(lambda: states[:2] == [(1, "silent"), (1, "back")])
    assert not cluster.coordinator.lost


def test_events_reach_the_watcher_even_if_it_once_fails(cluster, caplog, eventually):
    seen = []

    def watch(event):
        seen.append(event)
        if len(seen) == 1:
            raise ZeroDivisionError("a bug in the display")

    agent = cluster.start(1, on_event=watch).agent(0)
    events = [ProgressReport(0, 1, {"loss": 0.5}), Note(0, "hello"), ProgressReport(0, 2)]
    for event in events:
        agent.report(event)
    eventually(lambda: len(seen) == 3)
    assert seen == events
    assert "a bug in the display" in caplog.text


def test_stopping_gives_members_time_to_leave(cluster, make_member):
    agent = cluster.start(1).agent(0)
    join_all([agent], make_member)
    leaving = threading.Timer(0.2, agent.leave)
    leaving.start()
    cluster.thread.stop(grace_s=20)
    assert cluster.coordinator.left == {0}
    leaving.join()


def test_a_job_runs_undisturbed_while_strangers_misbehave(cluster, make_member):
    cluster.start(2)
    agents = [cluster.agent(rank) for rank in range(2)]
    join_all(agents, make_member)
    strangers = [cluster.stranger() for _ in range(100)]
    for index, sock in enumerate(strangers[:50]):
        sock.sendall([b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x10\x00"][index % 3])
    for count in range(1, 101):
        assert agents[count % 2].store_add("n", 1) == count
    assert agents[0].presence == {}
