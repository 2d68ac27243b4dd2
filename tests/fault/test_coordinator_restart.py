"""The coordinator is killed at any moment: members go on, it comes back, nothing is forgotten."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest
from coordinators import POINTS, Coordination, eventually, member

from paceline.control import messages as m
from paceline.control.membership.policy import Policy
from paceline.control.messages import Wanted
from paceline.errors import Evicted, PeerTimeout
from paceline.observe.telemetry.events import CoordinatorRestarted


@pytest.fixture
def coordination(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(workers=3, servers=0, **policy):
            chosen = Policy(num_workers=workers, num_servers=servers, is_elastic=True, **policy)
            return Coordination(tmp_path, chosen, stack)

        yield make


def lose(agent):
    """End a member as SIGKILL does: its connection breaks, and it does not come back."""
    agent._connection._is_lasting = False
    agent.thread.post(agent._connection.drop)


def test_members_go_on_without_it_and_attach_again(coordination):
    job = coordination(3, 1)
    job.start()
    news = []
    operator = job.operator(on_notification=news.append, is_launcher=True)
    agents = job.join_all()
    agents[0].store_set("before", b"1")
    before = operator.status()
    job.kill()
    eventually(lambda: not any(agent.is_attached for agent in agents.values()))
    assert all(agent.membership == before.membership for agent in agents.values())
    assert agents[0].over is None
    time.sleep(0.2)
    assert agents[0].unreachable_s > 0.1
    start_s = time.monotonic()
    job.start()
    eventually(lambda: all(agent.is_attached for agent in agents.values()))
    # 2 s, of which most is a new interpreter's: on a busy machine that takes several times longer.
    assert time.monotonic() - start_s < 20.0
    after = operator.status()
    assert (after.membership, after.policy) == (before.membership, before.policy)
    assert agents[1].store_get("before", 60) == b"1"
    eventually(
        lambda: any(isinstance(getattr(n, "event", None), CoordinatorRestarted) for n in news)
    )
    lose(agents.pop(2))
    eventually(lambda: agents[0].membership.workers == (0, 1))
    assert agents[0].membership.generation == 2


def test_a_call_waits_for_it_to_come_back_and_says_so(coordination, capfd):
    job = coordination(1)
    job.start()
    agents = job.join_all()
    assert agents[0].store_add("n", 1) == 1
    job.kill()
    eventually(lambda: not agents[0].is_attached)
    with pytest.raises(PeerTimeout, match=r"has not answered for 0.2 s; it has been away for"):
        agents[0].look(0.2)
    sums, said = [], []
    waiting = threading.Thread(target=lambda: sums.append(agents[0].store_add("n", 1)))
    waiting.start()

    def says_so():
        said.append(capfd.readouterr().err)
        return "rank 0 waits for the coordinator at" in "".join(said)

    eventually(says_so)
    job.start()
    waiting.join(60)
    assert sums == [2]


def test_what_was_done_but_not_answered_is_not_done_twice(coordination):
    job = coordination(2)
    job.start()
    agents = job.join_all()
    sums = []

    def count(rank):
        sums.extend(agents[rank].store_add("n", 1) for _ in range(100))

    threads = [threading.Thread(target=count, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(0.1)
        job.kill()
        job.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == list(range(1, 201))


def test_who_died_meanwhile_is_found_out(coordination):
    job = coordination(3, absent_s=5.0)
    job.start()
    news = []
    operator = job.operator(on_notification=news.append, is_launcher=True)
    agents = job.join_all()
    job.kill()
    agents.pop(1).thread.stop()
    agents.pop(2).thread.stop()
    operator.report_end(1, "killed by signal 9", m.LossKind.KILLED)  # nobody hears it
    job.start()
    eventually(lambda: agents[0].membership.workers == (0,))

    def whys():
        changes = [one for one in list(news) if isinstance(one, m.Changed)]
        return {loss.rank: loss.why for change in changes for loss in change.lost}

    eventually(lambda: len(whys()) == 2)
    assert whys()[1] == "killed by signal 9", "the launcher says it again"
    assert "did not reconnect after a restart" in whys()[2]


def test_who_was_let_go_or_taken_for_lost_meanwhile_learns_it(coordination):
    job = coordination(3)
    job.start()
    operator = job.operator()
    agents = job.join_all()
    agents[2].thread.post(agents[2]._connection.drop)
    eventually(lambda: isinstance(agents[2].ending, Evicted))
    for rank in (0, 1):
        agents[rank].wait_for_generation(1, 60)
        agents[rank].entered(2)
    operator.scale(1)
    eventually(lambda: operator.status().membership.workers == (0,))
    job.kill()
    job.start()
    eventually(lambda: agents[1].membership.workers == (0,))
    assert agents[1].over is None


def test_a_newcomer_waits_through_a_restart(coordination):
    job = coordination(2, max_workers=3)
    job.start()
    operator = job.operator()
    agents = job.join_all()
    lose(agents.pop(1))
    eventually(lambda: agents[0].membership.generation == 2)
    place = operator.reserve("worker")
    newcomer = job.agent(place.rank)
    newcomer.look()
    found = []
    mine = member(place.rank, number=place.number)
    waiting = threading.Thread(target=lambda: found.append(newcomer.ready(mine, 60)))
    waiting.start()
    eventually(lambda: not waiting.is_alive() or operator.status().not_adopted == (0,))
    job.kill()
    job.start()
    eventually(lambda: agents[0].is_attached)
    agents[0].entered(2)
    waiting.join(60)
    assert found[0].workers == (0, place.rank)
    assert found[0] == operator.status().membership


def story(job, agents, operator):
    """Everything that a coordinator writes down, once; waits for each effect."""
    lose(agents.pop(1))
    eventually(lambda: operator.status().membership.workers == (0, 2))
    agents[0].store_set("key", b"value")
    assert agents[2].store_add("n", 5) == 5
    place = operator.reserve("worker")
    newcomer = job.agent(place.rank)
    newcomer.look()
    found = []
    mine = member(place.rank, number=place.number)
    ready = threading.Thread(target=lambda: found.append(newcomer.ready(mine, 60)))
    ready.start()
    for rank in (0, 2):
        eventually(lambda rank=rank: agents[rank].wait_for_generation(1, 0.1) is not None)
        agents[rank].entered(agents[rank].membership.generation)
    ready.join(60)
    assert found
    assert found[0].workers == (0, place.rank, 2)
    agents[place.rank] = newcomer
    newcomer.entered(found[0].generation)
    for rank in (0, 2):
        eventually(lambda rank=rank: agents[rank].membership == found[0])
        agents[rank].entered(found[0].generation)
    eventually(lambda: operator.status().not_adopted == ())
    operator.scale(2)
    eventually(lambda: operator.status().membership.workers == (0, place.rank))
    return operator.status()


# The writes of the story: the header, all joined, one lost, two of the store (which are not
# synced), a place reserved, a newcomer let in, one let go.
WRITES = range(1, 9)
UNSYNCED = (4, 5)
ALWAYS = {(2, "torn"), (3, "written"), (7, "before"), (8, "synced")}


@pytest.mark.parametrize(
    ("write", "point"),
    [
        pytest.param(write, point, marks=[] if (write, point) in ALWAYS else pytest.mark.slow)
        for write in WRITES
        for point in POINTS
        if not (point == "synced" and write in UNSYNCED)
    ],
)
def test_killed_at_every_write_of_the_journal(coordination, write, point):
    """Whatever write it dies in, the story has the same end as without a fault."""
    job = coordination(3, max_workers=3, absent_s=5.0)
    job.start(dies=(point, write))
    again = job.restart_when_dead()
    agents = job.join_all()
    operator = job.operator()
    status = story(job, agents, operator)
    again.join(60)
    assert not again.is_alive(), f"there was no write {write}"
    assert job.died_with == -signal.SIGKILL, "it ended before that write"
    # No change is announced twice or skipped: 1 all, 2 without one, 3 with another, 4 scaled.
    assert status.generation == 4
    assert {(one.rank, one.number) for one in status.membership.members} == {(0, 0), (3, 1)}
    assert agents[0].store_get("key", 60) == b"value"
    assert agents[0].store_add("n", 0) == 5
    job.kill()
    job.start()
    assert operator.status(timeout_s=60.0).membership == status.membership


def test_wanted_places_are_told_again_to_a_launcher_that_comes_back(coordination):
    job = coordination(2)
    job.start()
    agents = job.join_all()
    lose(agents.pop(1))
    eventually(lambda: agents[0].membership.generation == 2)
    news = []
    job.operator(on_notification=news.append, is_launcher=True)
    eventually(lambda: Wanted("worker", 1) in news)
    news.clear()
    job.kill()
    job.start()
    eventually(lambda: Wanted("worker", 1) in news)
    assert not [n for n in news if isinstance(n, m.Unwanted)]


def test_a_full_disk_ends_it_before_it_says_what_it_could_not_write(coordination):
    job = coordination(3, absent_s=4.0)
    job.start(room_bytes=1200)
    agents = job.join_all()
    lose(agents.pop(2))
    assert job.process.wait(60) == 1
    assert "journal" in job.process.stderr.read()
    job.process.stderr.close()
    assert agents[0].membership.generation == 1
    job.start()
    eventually(lambda: agents[0].membership.workers == (0, 1))
    assert agents[0].membership.generation == 2


def test_it_ends_on_sigterm_and_not_on_ctrl_c(coordination):
    job = coordination(1)
    job.start()
    agents = job.join_all()
    job.process.send_signal(signal.SIGINT)  # Ctrl-C is for the launcher
    assert agents[0].store_add("n", 1) == 1
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(60) == 0
