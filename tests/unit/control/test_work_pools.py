"""Work pools: each portion is done once, whichever member asks, dies or reconnects."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control import messages as m
from paceline.control.client.local_agent import LocalAgent
from paceline.control.client.requests import wait_for_portion
from paceline.control.coordinator.journal import CoordinatorState, Journal
from paceline.control.coordinator.store import StoreService
from paceline.control.coordinator.work_pools import WorkPools
from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.errors import UsageError


def member(rank: int) -> Member:
    return Member(rank, "worker", "h", "h", 1, rank, "", "")


class Story:
    """Workers that take portions, in the order that hypothesis makes up."""

    def __init__(self, portions: int) -> None:
        self.pools, self.portions = WorkPools(), portions
        self.notes: list = []
        self.pools.note = self.notes.append
        self.held: dict[int, list[int]] = {}
        self.done: Counter[int] = Counter()
        self.unsure: set[int] = set()  # done by one that died before it said so
        self.requests = 0

    def take(self, rank: int) -> int:
        """Ask, hear the answer twice, and say what is done since the last time."""
        self.requests += 1
        done = tuple(self.held.get(rank, []))
        self.done.update(done)
        request = m.TakePortion(self.requests, "loader 0", 0, self.portions, done)
        answer = self.pools.take(rank, request)
        assert self.pools.take(rank, request).portion == answer.portion, "asked again: the same"
        self.held[rank] = [answer.portion] if answer.portion >= 0 else []
        return answer.portion

    def die(self, rank: int, *, worked: bool) -> None:
        if worked:
            self.unsure.update(self.held.get(rank, []))
        self.held.pop(rank, None)
        self.pools.release(rank)

    def restart(self, *, shortened: bool) -> None:
        """Another coordinator takes in what was noted."""
        notes = list(self.pools.entries()) if shortened else self.notes[:]
        self.pools = WorkPools()
        for entry in notes:
            self.pools.replay(entry)
        self.notes[:] = notes
        self.pools.note = self.notes.append


events = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["dies idle", "dies behind"]), st.integers(0, 4)),
        st.tuples(st.sampled_from(["restart", "shorten"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20), events)
def test_each_portion_is_done_once(portions: int, story: list[tuple[str, int]]) -> None:
    tale = Story(portions)
    for what, rank in story:
        if what == "take":
            tale.take(rank)
        elif what.startswith("dies"):
            tale.die(rank, worked=what == "dies behind")
        else:
            tale.restart(shortened=what == "shorten")
    ranks = [*tale.held, 9]
    while any(tale.take(rank) >= 0 for rank in ranks):
        pass
    assert sorted(tale.done) == list(range(portions)), "nothing is left out"
    assert set(tale.done.values()) == {1}, "nothing is lent to two that both live"
    state = tale.pools.look(m.LookAtPool(1, "loader 0", 0))
    assert state.done == ((0, portions),)
    assert len(tale.unsure) <= len(state.again), "what may count twice was counted"


@settings(deadline=None)
@given(st.integers(1, 20), st.sets(st.integers(0, 19)), st.sets(st.integers(0, 19)))
def test_what_an_earlier_job_has_done_is_not_lent(
    portions: int, first: set[int], second: set[int]
) -> None:
    """Two workers go on from states that differ a little; each tells its own when it comes."""
    first, second = ({p for p in told if p < portions} for told in (first, second))
    pools, notes = WorkPools(), []
    pools.note = notes.append
    had = []
    for rank, told in ((0, first), (1, second)):
        before = tuple((p, p + 1) for p in told)
        for request in range(1, 3):
            asked = m.TakePortion(10 * rank + request, "a", 0, portions, tuple(had[-1:]), before)
            had += [p for p in [pools.take(rank, asked).portion] if p >= 0]
    again = WorkPools()
    for entry in notes:
        again.replay(entry)
    assert list(again.entries()) == list(pools.entries())
    number = 100
    while (found := again.take(1, m.TakePortion(number, "a", 0, portions))).portion >= 0:
        had.append(found.portion)
        number += 1
    assert len(had) == len(set(had)), "nothing is lent twice"
    assert {*had, *first, *second} == set(range(portions)), "nothing is left out"
    assert not {*had[2:]} & {*first, *second}, "and nothing again that was known to be done"


def test_passes_are_apart_and_old_ones_are_over() -> None:
    pools = WorkPools()
    for index in range(40):
        assert pools.take(0, m.TakePortion(index + 1, "a", index, 2)).portion == 0
    assert pools.take(1, m.TakePortion(99, "a", 3, 2)) == m.Lent(99, -1, 0, 0)
    assert pools.take(1, m.TakePortion(100, "a", 39, 2)).portion == 1
    assert pools.take(1, m.TakePortion(101, "b", 0, 2)).portion == 0
    fresh = WorkPools()
    for entry in pools.entries():
        fresh.replay(entry)
    assert fresh.take(1, m.TakePortion(102, "a", 3, 2)) == m.Lent(102, -1, 0, 0)
    assert fresh.look(m.LookAtPool(1, "a", 39)) == pools.look(m.LookAtPool(1, "a", 39))


def test_what_means_nothing_is_refused() -> None:
    pools = WorkPools()
    pools.take(0, m.TakePortion(1, "a", 0, 3))
    with pytest.raises(
        UsageError, match="rank 2 has split pass 0 of a into 4 portions, expected 3"
    ):
        pools.take(2, m.TakePortion(2, "a", 0, 4))
    with pytest.raises(UsageError, match="no such portions"):
        pools.take(0, m.TakePortion(3, "a", 0, 3, (3,)))
    with pytest.raises(UsageError, match="no such portions"):
        pools.settle(0, m.SettlePortions("a", 0, (), (-1,)))
    for wrong in (("", 0, 3), ("a", -1, 3), ("a", 1, 0), ("a" * 500, 0, 3)):
        with pytest.raises(UsageError, match="no such pool"):
            pools.take(0, m.TakePortion(4, *wrong))
    pools.settle(0, m.SettlePortions("unknown", 0, (7,)))
    pools.settle(1, m.SettlePortions("a", 0, (0,)))  # of another one: it has no say
    assert pools.take(0, m.TakePortion(5, "a", 0, 3)).missing == 0
    pools.settle(0, m.SettlePortions("a", 0, (), (0,)))
    assert pools.take(1, m.TakePortion(6, "a", 0, 3)).portion == 0


def test_the_journal_keeps_them(tmp_path) -> None:
    policy = Policy(num_workers=2, is_elastic=True)
    pools = WorkPools()
    record = CoordinatorState(Journal(tmp_path / "journal", "job-1", policy), StoreService(), pools)
    for number in range(6):
        pools.take(
            number % 2, m.TakePortion(number + 1, "a", 0, 9, tuple(range(number - 1, 0, -2)))
        )
    pools.release(1)
    before = list(pools.entries())
    record.close()
    again = WorkPools()
    CoordinatorState(Journal(tmp_path / "journal", "job-1", policy), StoreService(), again).close()
    assert list(again.entries()) == before


def test_over_a_connection_and_alone(cluster) -> None:
    alone = LocalAgent()
    cluster.start(2)
    agents = [cluster.agent(0), cluster.agent(1)]
    answers = []
    with pytest.raises(Exception, match="gets no work"):
        wait_for_portion(agents[0].take_portion("a", 0, 3))
    threads = [threading.Thread(target=lambda r=r: agents[r].join(member(r), 20)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent in (agents[0], alone):
        assert wait_for_portion(agent.take_portion("a", 0, 3)).portion == 0
        assert wait_for_portion(agent.take_portion("a", 0, 3, (0,))).portion == 1
        agent.settle_portions("a", 0, (1,))
        state = agent.pool_state("a", 0)
        answers.append((state.portions, state.done, state.again))
        with pytest.raises(UsageError, match="into 4 portions, expected 3"):
            wait_for_portion(agent.take_portion("a", 0, 4))
    assert answers == [(3, ((0, 2),), ())] * 2
    assert wait_for_portion(agents[0].take_portion("a", 0, 3)).portion == 2
    cluster.cut(agents[0])
    deadline = time.monotonic() + 60
    while (answer := wait_for_portion(agents[1].take_portion("a", 0, 3))).portion < 0:
        assert time.monotonic() < deadline
    assert (answer.portion, answer.again) == (2, 1)


def test_the_rest_of_a_portion_is_leased_after_a_planned_leave() -> None:
    pools, notes = WorkPools(), []
    pools.note = notes.append
    first = pools.take(0, m.TakePortion(1, "a", 0, 4))
    pools.settle(0, m.SettlePortions("a", 0, begun=((first.portion, 5),)))
    pools.release(0)  # it is gone
    again = WorkPools()
    for entry in notes:
        again.replay(entry)
    for one in (pools, again):
        found = one.take(1, m.TakePortion(2, "a", 0, 4))
        assert (found.portion, found.begun, found.again) == (first.portion, 5, 0)
    with pytest.raises(UsageError, match="parts"):
        pools.settle(1, m.SettlePortions("a", 0, begun=((0, -1),)))
