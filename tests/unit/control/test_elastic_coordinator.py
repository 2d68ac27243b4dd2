"""Members come and go: real agents and operators with a real coordinator in this process."""

from __future__ import annotations

import re
import threading
import time

import pytest

from paceline.control import messages as m
from paceline.control import operator_messages as o
from paceline.control.client.local_agent import LocalAgent
from paceline.control.client.operator import Operator
from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.messages import Unwanted, Wanted
from paceline.errors import Evicted, PeerTimeout, RendezvousError, UsageError
from paceline.observe.telemetry.events import (
    BackupCaughtUp,
    MemberJoined,
    MemberLost,
    Note,
    Promoted,
)


def member(rank, role="worker", number=None):
    number = rank if number is None else number
    return Member(rank, role, "h", "h", 1000 + rank, number, "", "", number)


class Job:
    """An elastic job with a launcher that writes down what it hears."""

    def __init__(self, cluster, secret, job_id, eventually, stack, workers=3, servers=0, **policy):
        self.policy = Policy(num_workers=workers, num_servers=servers, is_elastic=True, **policy)
        cluster.start(workers + servers, policy=self.policy)
        self.cluster, self.eventually = cluster, eventually
        self.news = []
        self.agents = {}
        joins = []
        for rank in range(workers + servers):
            role = "worker" if rank < workers else "server"
            self.agents[rank] = cluster.agent(rank, role=role, is_lasting=True)
            mine = member(rank, role, rank if rank < workers else rank - workers)
            joins.append(threading.Thread(target=self.agents[rank].join, args=(mine, 20)))
        for join in joins:
            join.start()
        for join in joins:
            join.join()
        self.operator = Operator.connect(
            cluster.address, secret, job_id, on_notification=self.news.append, is_launcher=True
        )
        stack.append(self.operator.close)

    @property
    def membership(self):
        return self.cluster.coordinator.membership

    def heard(self, kind):
        events = [n.event if isinstance(n, o.Happened) else n for n in list(self.news)]
        return [event for event in events if isinstance(event, kind)]

    def lose(self, rank):
        """End a member as SIGKILL does: its connection breaks, and nobody attaches again."""
        agent = self.agents.pop(rank)
        agent._connection._is_lasting = False
        self.cluster.cut(agent)

    def adopt(self):
        for agent in self.agents.values():
            agent.entered(self.membership.generation)

    def come(self, role="worker", number=None):
        place = self.operator.reserve(role, number)
        agent = self.cluster.agent(place.rank, role=role, is_lasting=True)
        agent.look()
        self.agents[place.rank] = agent
        mine = member(place.rank, role, place.number)
        ready = threading.Thread(target=agent.ready, args=(mine, 20))
        ready.start()
        return place.rank, ready


@pytest.fixture
def job(cluster, secret, job_id, eventually):
    ends = []

    def make(workers=3, servers=0, **policy):
        return Job(cluster, secret, job_id, eventually, ends, workers, servers, **policy)

    yield make
    for end in ends:
        end()


def test_a_lost_worker_is_announced_to_all_and_wanted_again(job, eventually):
    job = job(3, lease_s=30.0)
    seen = []
    job.agents[0].on_changed = seen.append
    start_s = time.monotonic()
    job.lose(2)
    eventually(lambda: seen)
    assert time.monotonic() - start_s < job.policy.lease_s, "at once: nobody waits for a lease"
    eventually(lambda: seen[0].membership == job.membership == job.agents[0].membership)
    assert [loss.rank for loss in seen[0].lost] == [2]
    eventually(lambda: 2 in job.agents[0].presence)
    assert job.agents[0].presence[2].state == "lost"
    assert job.agents[1].wait_for_generation(1, 60).workers == (0, 1)
    eventually(lambda: job.heard(Wanted) and job.heard(MemberLost))
    assert job.heard(Wanted) == [Wanted("worker", 2)]
    assert [(e.role, e.number, e.rank) for e in job.heard(MemberLost)] == [("worker", 2, 2)]


def test_a_newcomer_comes_in_when_all_have_adopted(job, eventually):
    job = job(2, max_workers=3)
    rank, ready = job.come()
    eventually(lambda: rank in job.membership.ranks)
    ready.join()
    assert job.agents[rank].membership.workers == (0, 1, 2)
    assert job.agents[0].wait_for_generation(1, 60).generation == 2
    eventually(lambda: job.heard(MemberJoined))
    second, ready = None, None
    with pytest.raises(RendezvousError, match="--max 3"):
        job.come()
    job.lose(1)
    eventually(lambda: job.membership.generation == 3)
    second, ready = job.come()
    time.sleep(0.1)
    assert second not in job.membership.ranks
    job.adopt()
    ready.join()
    assert job.membership.workers == (0, second, rank)


def test_replace_holds_the_place_open(job, eventually):
    job = job(2, on_loss="replace")
    job.lose(1)
    eventually(lambda: 1 in job.agents[0].presence)
    assert job.agents[0].wait_for_generation(1, 0.1) is None
    rank, ready = job.come()
    ready.join()
    assert job.membership.workers == (0, rank)
    assert job.agents[0].wait_for_generation(1, 60).workers == (0, rank)


def test_too_few_are_over_for_all_and_for_who_waits(job, eventually):
    job = job(3, min_workers=3, max_workers=4)
    rank, ready = job.come()
    ready.join()
    told = []
    job.agents[0].on_over = told.append
    failures = []

    def come():
        agent = job.cluster.agent(job.operator.reserve("worker").rank, is_lasting=True)
        try:
            agent.ready(member(4, number=1), 20)
        except RendezvousError as error:
            failures.append(str(error))

    job.lose(1)
    eventually(lambda: job.membership.generation == 3)
    waiting = threading.Thread(target=come)
    waiting.start()
    eventually(lambda: 4 in job.cluster.coordinator.roster._candidates)
    job.lose(2)
    eventually(lambda: job.agents[0].over)
    assert "2 workers are left, expected at least 3" in job.agents[0].over
    eventually(lambda: told == [job.agents[0].over])
    waiting.join()
    assert "the job is over" in failures[0]
    eventually(lambda: job.heard(m.Over))
    assert job.operator.status().over == job.agents[0].over


def test_a_lost_server_is_replaced_by_its_backup_and_filled_again(job, eventually):
    job = job(1, 2, replicas=2)
    assert job.membership.partitions == ((1, 2), (2, 1))
    job.lose(1)
    eventually(lambda: job.membership.partitions == ((2,), (2,)))
    assert job.operator.status().degraded == (0, 1)
    job.adopt()
    rank, ready = job.come("server")
    ready.join()
    job.adopt()
    eventually(lambda: job.membership.fills(rank) == (0, 1))
    eventually(lambda: job.agents[rank].membership == job.membership)
    for partition in (0, 1):
        job.agents[rank].in_sync(partition, job.agents[rank].membership.generation)
    eventually(lambda: (job.adopt(), all(len(r) == 2 for r in job.membership.partitions))[1])
    assert job.operator.status().degraded == ()
    eventually(lambda: sum(len(e.partitions) for e in job.heard(BackupCaughtUp)) == 2)
    assert job.heard(Promoted)[0].partitions == (0,)


def test_scaling_asks_for_processes_and_lets_them_go(job, eventually):
    job = job(2, max_workers=3)
    job.operator.scale(3)
    eventually(lambda: job.heard(Wanted) == [Wanted("worker", 2)])
    _, ready = job.come("worker", 2)
    ready.join()
    job.adopt()
    job.operator.scale(1)
    eventually(lambda: job.heard(Unwanted) == [Unwanted(1), Unwanted(2)])
    newest = job.agents[1].wait_for_generation(2, 60)
    assert newest.workers == (0,)
    assert job.agents[1].over is None, "it was let go, not evicted"
    for wrong in (0, 4):
        with pytest.raises(UsageError, match="may have 1 to 3"):
            job.operator.scale(wrong)
    with pytest.raises(UsageError, match="no servers"):
        job.operator.servers_add(1)


def test_an_evicted_member_is_told_so(job, eventually):
    job = job(3, lease_s=1.0)
    told = []
    job.agents[2].on_over = told.append
    job.agents[2]._connection._heartbeat_s = 3600.0
    job.operator.report_stopped(2, 0.1)
    eventually(lambda: told)
    assert "rank 2 was taken for lost" in told[0]
    assert re.search(r"its process has been stopped for \d+\.\d s", told[0]), told
    assert isinstance(job.agents[2].ending, Evicted)
    assert job.agents[2].membership.generation == 1
    with pytest.raises(Evicted, match="start it again, as a newcomer"):
        job.agents[2].store_num_keys()
    assert job.membership.workers == (0, 1)


def test_a_member_that_was_cut_off_finds_out_when_it_is_back(job, eventually):
    job = job(3)
    job.cluster.cut(job.agents[2])
    eventually(lambda: job.agents[2].over)
    assert isinstance(job.agents[2].ending, Evicted)


def test_silence_is_lost_after_the_lease_unless_the_launcher_sees_it_run(job, eventually):
    job = job(3, lease_s=2.0, silent_s=0.7)
    for rank in (1, 2):
        job.agents[rank]._connection._heartbeat_s = 3600.0
    job.operator.report_running(1)
    eventually(lambda: 2 in job.cluster.coordinator.lost)
    (silent_s,) = re.findall(r"no heartbeat for ([\d.]+) s", job.cluster.coordinator.lost[2])
    assert float(silent_s) >= 2.0
    eventually(lambda: job.membership.workers == (0, 1))
    eventually(lambda: 1 in job.agents[0].presence)
    assert job.agents[0].presence[1].detail.endswith("its process runs")
    time.sleep(1.0)
    assert job.membership.workers == (0, 1)


def test_the_launchers_words_about_an_end_are_told(job, eventually):
    job = job(3)
    why = "killed by signal 9, memory cgroup limit reached"
    job.operator.report_end(1, why, m.LossKind.KILLED)
    eventually(lambda: job.membership.workers == (0, 2))
    eventually(lambda: job.heard(m.Changed))
    (loss,) = job.heard(m.Changed)[0].lost
    assert (loss.why, loss.kind) == (why, m.LossKind.KILLED)


def test_a_mate_whose_end_is_seen_first_is_not_taken_for_the_cause(job, eventually):
    job = job(4, mesh="dp=2,tp=2", min_workers=2)
    job.agents[2].leave(is_finished=False, has_lost_peer=True)
    job.operator.report_end(2, "exit code 1", m.LossKind.LOST_PEER)
    job.operator.report_end(3, "killed by signal 9", m.LossKind.KILLED)
    eventually(lambda: job.membership.workers == (0, 1))
    eventually(lambda: job.heard(m.Changed))
    kinds = {loss.rank: loss.kind for loss in job.heard(m.Changed)[-1].lost}
    assert kinds == {2: m.LossKind.RETIRED, 3: m.LossKind.KILLED}


def test_one_that_ends_with_code_0_and_without_a_word_has_finished(job, eventually):
    job = job(3)
    job.operator.report_end(1, "exited with code 0", None)
    job.operator.status()  # which is answered when that was read
    job.lose(1)
    eventually(lambda: job.membership.workers == (0, 2))
    eventually(lambda: job.heard(m.Changed))
    assert job.heard(m.Changed)[-1].lost == ()


def test_a_last_word_that_was_not_read_yet_is_no_loss(job, eventually):
    job = job(3)
    job.operator.report_end(1, "exited with code 0", None)
    job.agents[1].leave()
    eventually(lambda: job.membership.workers == (0, 2))
    eventually(lambda: 1 in job.agents[0].presence)
    assert job.agents[0].presence[1].state == "left"
    eventually(lambda: job.heard(m.Changed))
    assert job.heard(m.Changed)[-1].lost == ()


def test_status_says_how_the_job_is(job, eventually):
    job = job(2, 1)
    status = job.operator.status()
    assert status.membership == job.membership
    assert (status.generation, status.policy, status.wanted) == (1, job.policy, ())
    job.agents[0].report(Note(0, "hello"))
    eventually(lambda: job.heard(Note) == [Note(0, "hello")])


def test_a_claimed_rank_cannot_be_taken_over(job):
    job = job(2)
    stranger = job.cluster.agent(1)
    with pytest.raises(RendezvousError, match="claimed twice"):
        stranger.join(member(1), 5)


def test_accusations_reach_the_roster(job, eventually):
    job = job(3, accused_s=0.3)
    job.agents[0].report_unreachable(2, "connection refused")
    job.agents[1].report_unreachable(2, "connection refused")
    eventually(lambda: job.membership.workers == (0, 1))
    eventually(lambda: 2 in job.cluster.coordinator.lost)
    assert "ranks 0, 1 cannot reach it" in job.cluster.coordinator.lost[2]


def test_a_wait_that_is_in_vain_ends_in_time(job):
    job = job(2)
    start_s = time.monotonic()
    assert job.agents[0].wait_for_generation(1, 0.2) is None
    assert 0.15 < time.monotonic() - start_s < 20, "in time, even if nobody runs for seconds"
    with pytest.raises(PeerTimeout):
        job.agents[0].ready(member(0), 0.0)


def test_one_process_alone_has_the_same_surface():
    agent = LocalAgent()
    membership = agent.join(member(0))
    assert agent.look() == membership
    assert agent.wait_for_generation(0, 0.01) == membership
    assert agent.wait_for_generation(1, 0.01) is None
    agent.entered(1)
    agent.report_unreachable(0, "nobody")
    agent.in_sync(0, 1)
    assert (agent.over, agent.is_attached, agent.unreachable_s) == (None, True, 0.0)
