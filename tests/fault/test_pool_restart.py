"""The coordinator is killed while it leases portions: none is lost, none is leased twice."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter

import pytest
from coordinators import POINTS, Coordination, eventually

from paceline.control.client.requests import wait_for_portion
from paceline.control.membership.policy import Policy


@pytest.fixture
def coordination(tmp_path):
    with contextlib.ExitStack() as stack:
        policy = Policy(num_workers=2, is_elastic=True, absent_s=4.0)
        yield Coordination(tmp_path, policy, stack)


@pytest.mark.parametrize("point", POINTS[:3])
def test_portions_are_lent_once_over_restarts(coordination, point):
    portions = 24
    # The first write is the membership; then one for the pool, and one for each question.
    coordination.start(dies=(point, 9))
    watch = coordination.restart_when_dead()
    agents = coordination.join_all()
    had: dict[int, list[int]] = {0: [], 1: []}
    while True:
        questions = {
            rank: agent.take_portion("a", 0, portions, tuple(had[rank][-1:]))
            for rank, agent in agents.items()
        }
        found = {rank: wait_for_portion(question).portion for rank, question in questions.items()}
        for rank, portion in found.items():
            if portion >= 0:
                had[rank].append(portion)
        if max(found.values()) < 0:
            break
    watch.join()
    assert coordination.died_with == -signal.SIGKILL, "it ended before that write"
    counts = Counter([*had[0], *had[1]])
    assert sorted(counts) == list(range(portions)) and set(counts.values()) == {1}
    eventually(lambda: agents[0].pool_state("a", 0).done == ((0, portions),))


def test_portions_of_one_who_does_not_come_back_are_for_others(coordination):
    coordination.start()
    agents = coordination.join_all()
    assert [wait_for_portion(agents[rank].take_portion("a", 0, 3)).portion for rank in (0, 1)] == [
        0,
        1,
    ]
    coordination.kill()
    agents[1].thread.stop()
    coordination.start()
    assert wait_for_portion(agents[0].take_portion("a", 0, 3, (0,))).portion == 2
    done = (2,)

    def comes_back() -> bool:
        nonlocal done
        answer, done = wait_for_portion(agents[0].take_portion("a", 0, 3, done)), ()
        return (answer.portion, answer.again) == (1, 1)

    eventually(comes_back)
