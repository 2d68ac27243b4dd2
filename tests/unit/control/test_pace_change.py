"""Another pace for a running job: who is asked, what is settled, who may refuse."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.control.client.operator import Operator
from paceline.control.messages import PaceAnswer, PaceSettled, PaceWanted
from paceline.errors import RendezvousError, UsageError


class Worker:
    """Answers like a worker's control thread, with a fixed step or problem."""

    def __init__(self, agent, step: int, problem: str = "") -> None:
        self.agent, self.step, self.problem = agent, step, problem
        self.settled: list[PaceSettled] = []
        agent.on_pace = self._on_news

    def _on_news(self, news) -> None:
        if isinstance(news, PaceWanted):
            self.agent.answer_pace(PaceAnswer(news.number, self.step, self.problem))
        else:
            self.settled.append(news)


@pytest.fixture
def make(cluster, make_member, secret, job_id, request):
    """Return a function that makes a job of workers with these steps, and its operator."""

    def make(*steps: int) -> tuple[list[Worker], Operator]:
        cluster.start(len(steps))
        agents = [cluster.agent(rank) for rank in range(len(steps))]
        joins = [
            threading.Thread(target=agent.join, args=(make_member(rank), 20))
            for rank, agent in enumerate(agents)
        ]
        for join in joins:
            join.start()
        for join in joins:
            join.join()
        operator = Operator.connect(cluster.address, secret, job_id)
        request.addfinalizer(operator.close)
        workers = [Worker(agent, step) for agent, step in zip(agents, steps, strict=True)]
        return workers, operator

    return make


def test_the_largest_step_is_one_that_nobody_has_passed(make, eventually):
    workers, operator = make(7, 12, 9)
    assert operator.set_pace("local:4") == 12
    eventually(lambda: all(worker.settled for worker in workers))
    assert all(worker.settled == [PaceSettled(1, "local:4", 12)] for worker in workers)
    workers[0].step = 40
    assert operator.set_pace("allreduce") == 40
    eventually(lambda: all(len(worker.settled) == 2 for worker in workers))
    assert workers[2].settled[-1] == PaceSettled(2, "allreduce", 40)


def test_one_worker_may_refuse_for_all(make, eventually):
    workers, operator = make(7, 12)
    workers[1].problem = "it cannot be"
    with pytest.raises(UsageError, match="it cannot be"):
        operator.set_pace("ps")
    eventually(lambda: all(worker.settled for worker in workers))
    assert all(worker.settled[0].step < 0 for worker in workers), "nobody waits any more"


def test_a_worker_that_has_left_is_not_waited_for(make, eventually):
    workers, operator = make(7, 12)
    workers[1].agent.leave()
    assert operator.set_pace("local:4") == 7
    eventually(lambda: workers[0].settled)


def test_a_worker_that_is_lost_meanwhile_is_not_waited_for(make, eventually, cluster):
    workers, operator = make(7, 12)
    workers[1].agent.on_pace = lambda _: cluster.cut(workers[1].agent)
    assert operator.set_pace("local:4") == 7
    eventually(lambda: workers[0].settled)


def test_who_is_no_worker_of_the_job_has_no_say(make, eventually, cluster):
    workers, operator = make(7, 12)
    newcomer, has_refused = cluster.agent(5), threading.Event()
    newcomer.look()

    def refuse(news) -> None:
        if isinstance(news, PaceWanted):
            newcomer.answer_pace(PaceAnswer(news.number, -1, "it has no distributed model yet"))
            newcomer.thread.post(has_refused.set)

    def answer_behind_it(news) -> None:
        assert has_refused.wait(20)
        time.sleep(0.1)  # what the newcomer has said is on its way
        Worker._on_news(workers[1], news)

    newcomer.on_pace, workers[1].agent.on_pace = refuse, answer_behind_it
    assert operator.set_pace("local:4") == 12
    eventually(lambda: all(worker.settled for worker in workers))


def test_a_job_that_is_not_complete_has_no_pace(cluster, secret, job_id):
    cluster.start(2)
    operator = Operator.connect(cluster.address, secret, job_id)
    with pytest.raises(RendezvousError, match="still forming"):
        operator.set_pace("local:4")
    operator.close()
