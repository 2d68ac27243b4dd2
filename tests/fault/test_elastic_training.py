"""All-reduce training while workers are killed, replaced and added."""

from __future__ import annotations

import hashlib
import random
import signal
import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.runtime.job import current
from support import receive, report
from support.elastic import ElasticJob, elastic_job, pause_if_held


def policy(workers: int, **changes) -> Policy:
    return Policy(
        num_workers=workers, is_elastic=True, **{"min_workers": 1, "max_workers": 8, **changes}
    )


def make_model(*, norm: bool = False, optimizer: str = "Adam"):
    torch.manual_seed(0)
    between = nn.BatchNorm1d(64) if norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(20, 64), between, nn.Linear(64, 1))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    return pl.distribute(model, made, bucket_mb=0.001)


def digest(model: nn.Module) -> str:
    state = [*model.parameters(), *model.buffers()]
    data = b"".join(t.detach().contiguous().numpy().tobytes() for t in state)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def train(group: Group, until: int, kind: str = "", pause_s: float = 0.01) -> dict:
    """Train until so many steps are done; tell what is there after each."""
    model, optimizer = make_model(norm=kind == "norm")
    job = current()
    while job.steps_done < until:
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(job.steps_done))
        loss = model(x + pl.rank()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size(), digest(model)))
        time.sleep(pause_s)
        pause_if_held(job.steps_done)
    return {"steps": job.steps_done, "changes": job.elastic.num_changes}


class Diary:
    """What the workers of a job have told, by rank."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        self.steps: dict[int, dict[int, tuple[int, str]]] = {}

    def receive_until(self, rank: int, step: int, timeout_s: float = 60.0) -> None:
        """Wait until a worker has done that step."""
        mine = self.steps.setdefault(rank, {})
        while max(mine, default=0) < step:
            done, size, state = self._job.ranks.receive(rank, timeout_s)
            mine[done] = (size, state)

    def receive_rest(self) -> None:
        for rank, process in enumerate(self._job.processes):
            for done, size, state in process.told:
                self.steps.setdefault(rank, {})[done] = (size, state)
            process.told.clear()

    def require_agreement(self, first: int = 0) -> None:
        """All workers that did a step had the same state behind it."""
        every = sorted({step for steps in self.steps.values() for step in steps if step >= first})
        for step in every:
            states = {steps[step][1] for steps in self.steps.values() if step in steps}
            assert len(states) == 1, f"step {step}: {self.steps}"


@pytest.mark.parametrize("kind", ["", "norm"])
def test_survivors_go_on_when_a_worker_is_killed(kind):
    with elastic_job(policy(3)) as job:
        job.hold_behind(40)  # the kill comes before the end
        job.start(train, 60, kind)
        diary = Diary(job)
        diary.receive_until(0, 10)
        job.ranks.kill(1)
        job.let_go()
        outcomes = job.ranks.wait(60)
        assert [o.status for o in outcomes] == [0, -signal.SIGKILL, 0], "\n".join(
            map(str, outcomes)
        )
        diary.receive_rest()
        diary.require_agreement()
        assert diary.steps[0][60][0] == 2
        assert sorted(diary.steps[0]) == list(range(1, 61))  # no step was left out or done twice


def test_the_first_worker_is_nothing_special():
    with elastic_job(policy(3)) as job:
        job.hold_behind(30)
        job.start(train, 50)
        diary = Diary(job)
        diary.receive_until(2, 10)
        job.ranks.kill(0)
        job.let_go()
        outcomes = job.ranks.wait(60)
        assert [o.status for o in outcomes] == [-signal.SIGKILL, 0, 0]
        diary.receive_rest()
        diary.require_agreement()


def test_a_newcomer_receives_everything_from_a_peer():
    with elastic_job(policy(2)) as job:
        job.hold_behind(80)  # it comes in before the end
        job.start(train, 100)
        diary = Diary(job)
        diary.receive_until(0, 10)
        newcomer = job.add()
        job.wait_for_member(newcomer)
        job.let_go()
        diary.receive_until(newcomer, 100)
        values = job.ranks.values(60)
        diary.receive_rest()
        diary.require_agreement()
        first = min(diary.steps[newcomer])
        assert 10 < first < 100
        assert values[0]["changes"] == 1
        assert diary.steps[0][100][0] == 3


def test_two_at_once_and_replacements():
    with elastic_job(policy(4)) as job:
        job.hold_behind(15)
        job.start(train, 120)
        diary = Diary(job)
        diary.receive_until(0, 10)
        job.ranks.kill(1)
        job.ranks.kill(3)
        job.hold_behind(100)
        diary.receive_until(0, 20)
        assert diary.steps[0][20][0] == 2
        new = [job.add(), job.add()]
        for rank in new:
            job.wait_for_member(rank)
        job.let_go()
        for rank in new:
            diary.receive_until(rank, 120)
        outcomes = job.ranks.wait(60)
        assert [o.status for o in outcomes] == [0, -9, 0, -9, 0, 0]
        diary.receive_rest()
        diary.require_agreement()
        assert diary.steps[0][120][0] == 4


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_kills_and_joins(seed):
    """Ten kills at random instants, each followed by a newcomer; nothing diverges."""
    chance = random.Random(seed)
    with elastic_job(policy(3)) as job:
        job.start(train, 100_000, "norm", 0.0)
        diary = Diary(job)
        alive = [0, 1, 2]
        for rank in alive:
            diary.receive_until(rank, 5)
        for _ in range(10):
            time.sleep(chance.uniform(0.0, 0.3))
            victim = alive.pop(chance.randrange(len(alive)))
            job.ranks.kill(victim)
            newcomer = job.add()
            diary.receive_until(newcomer, 1)
            alive.append(newcomer)
        for rank in alive:
            diary.receive_until(rank, max(diary.steps[alive[-1]]) + 5)
        diary.receive_rest()
        diary.require_agreement()


def train_by_number(group: Group, until: int, pause_s: float) -> str:
    """Train on batches that follow from the step and this worker's number alone."""
    model, optimizer = make_model(norm=True)
    job = current()
    job.elastic.join_running_job()
    while job.steps_done < until:
        seed = 1000 * job.steps_done + job.env.number
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size(), digest(model)))
        time.sleep(pause_s)
        pause_if_held(job.steps_done)
    return digest(model)


@pytest.mark.parametrize(
    "kills", [4, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_replacement_makes_the_run_what_it_would_have_been(kills):
    """--on-loss replace: final parameters and buffers to the bit, whoever was killed, whenever."""
    steps = 30 + 10 * kills
    with elastic_job(policy(3, on_loss="replace")) as job:
        job.start(train_by_number, steps, 0.0)
        expected = set(job.ranks.values(60))
    assert len(expected) == 1
    chance = random.Random(kills)
    with elastic_job(policy(3, on_loss="replace")) as job:
        job.hold_behind(14)  # each kill comes before the next ten steps
        job.start(train_by_number, steps, 0.005)
        diary = Diary(job)
        holder = {0: 0, 1: 1, 2: 2}  # by number: the rank
        for kill in range(kills):
            job.hold_behind(10 * kill + 14)
            for rank in holder.values():
                diary.receive_until(rank, 10 * kill + 5)
            time.sleep(chance.uniform(0.0, 0.02))
            number = chance.randrange(3)
            job.ranks.kill(holder[number])
            holder[number] = job.add(number=number)
        job.let_go()
        outcomes = job.ranks.wait(120)
        finished = [o for o in outcomes if o.status == 0]
        assert len(finished) == 3, "\n".join(map(str, outcomes))
        assert {o.value for o in finished} == expected


def test_scaling_down_loses_no_step():
    """A worker that is told to leave does so between two steps, and ends well."""
    with elastic_job(policy(3)) as job:
        job.hold_behind(40)
        job.start(train, 80)
        diary = Diary(job)
        diary.receive_until(0, 10)
        job.operator.scale(2)
        job.let_go()
        outcomes = job.ranks.wait(60)
        assert [o.status for o in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))
        diary.receive_rest()
        diary.require_agreement()
        done = sorted(max(steps) for steps in diary.steps.values())
        assert done[0] < 80 and done[1:] == [80, 80]


def stop_when_asked(group: Group, until: int) -> int:
    model, optimizer = make_model()
    job = current()
    while job.steps_done < until and not pl.should_stop():
        model(torch.randn(8, 20)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report(job.steps_done)
        time.sleep(0.01)
    return job.steps_done


def test_a_signal_to_one_worker_stops_all_behind_the_same_step():
    with elastic_job(policy(3)) as job:
        job.start(stop_when_asked, 10_000)
        for rank in range(3):
            job.ranks.receive(rank)
        job.ranks.kill(1, signal.SIGTERM)
        assert len(set(job.ranks.values())) == 1


def test_a_second_signal_ends_at_once():
    def busy(group: Group) -> None:
        pl.should_stop()
        report("ready")
        # Two signals that are pending at the same time are one: the second waits for the first.
        while not current().stopping.is_wanted():
            time.sleep(0.01)
        report("asked")
        while True:
            time.sleep(0.01)

    with elastic_job(policy(1)) as job:
        job.start(busy)
        assert job.ranks.receive(0) == "ready"
        job.ranks.kill(0, signal.SIGTERM)
        assert job.ranks.receive(0) == "asked"
        job.ranks.kill(0, signal.SIGTERM)
        (outcome,) = job.ranks.wait()
        assert outcome.status == -signal.SIGTERM


def finish_early(group: Group) -> int:
    """Finish while a newcomer is on its way in."""
    model = nn.Linear(2, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    is_new = current().env.is_newcomer
    for step in range(100_000):
        if is_new and step == 0:
            report("comes in")
        model(torch.ones(1, 2)).sum().backward()
        if not is_new and step == 5:
            report("waits")
            receive()
            return step  # without a boundary at which the newcomer could come in
        optimizer.step()
        optimizer.zero_grad()
    return -1


def test_who_comes_when_all_others_have_finished_ends_in_peace() -> None:
    with elastic_job(policy(2)) as job:
        job.start(finish_early)
        for rank in (0, 1):
            assert job.ranks.receive(rank) == "waits"
        newcomer = job.add()
        assert job.ranks.receive(newcomer) == "comes in"
        job.wait_for_member(newcomer)
        for rank in (0, 1):
            job.ranks.send(rank, "end")
        outcomes = job.ranks.wait()
        assert [o.status for o in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))
        assert "is not needed: the other workers have finished" in job.ranks.output(newcomer)
