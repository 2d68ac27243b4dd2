"""Training through servers while servers and workers are killed, replaced and added."""

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
from support import report
from support.elastic import ElasticJob, elastic_job, pause_if_held

STEPS = 60
SLOW = pytest.mark.slow
PACES = ["ps", pytest.param("ssp:2", marks=SLOW), pytest.param("async", marks=SLOW)]


def policy(workers: int = 2, servers: int = 2, **changes: object) -> Policy:
    return Policy(
        num_workers=workers,
        num_servers=servers,
        is_elastic=True,
        **{
            "min_workers": 1,
            "max_workers": 8,
            "replicas": 2,
            "num_partitions": servers,
            **changes,
        },
    )


def digest(model: nn.Module) -> str:
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def train(group: Group, pace: str, until: int = STEPS, pause_s: float = 0.01) -> dict:
    """Train until so many steps are done; tell what is there after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1))
    made = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.01)
    job = current()
    for step in pl.steps(until):
        seed = 1000 * step + job.env.number
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report((step + 1, pl.world_size(), digest(model)))
        time.sleep(pause_s)
        pause_if_held(step + 1)
    state = optimizer.state_dict()["state"]
    return {"steps": job.steps_done, "digest": digest(model), "entries": len(state)}


class Diary:
    """What the workers of a job have told, by rank: their steps, with the state behind each."""

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

    def states(self) -> dict[int, str]:
        """The state behind each step, in which all who did it agree."""
        found: dict[int, set[str]] = {}
        for steps in self.steps.values():
            for step, (_, state) in steps.items():
                found.setdefault(step, set()).add(state)
        differing = {
            step: {rank: steps.get(step) for rank, steps in self.steps.items()}
            for step, states in found.items()
            if len(states) > 1
        }
        assert not differing, dict(list(differing.items())[:5])
        return {step: state for step, (state,) in found.items()}


def end_of(job: ElasticJob, ranks: list[int], timeout_s: float = 60.0) -> list[dict]:
    """Wait for these workers, which end well; return what they returned."""
    outcomes = job.ranks.wait(timeout_s, ranks)
    assert all(o.status == 0 and o.error is None for o in outcomes), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


def undisturbed(pace: str, steps: int = STEPS) -> dict[int, str]:
    with elastic_job(policy()) as job:
        job.start(train, pace, steps, 0.0)
        end_of(job, [0, 1])
        diary = Diary(job)
        diary.receive_rest()
        return diary.states()


@pytest.mark.parametrize("pace", ["ps", "ps[compress=topk:0.05]"])
def test_the_loss_of_a_server_changes_no_bit_in_lockstep(pace: str) -> None:
    expected, chosen = undisturbed(pace), random.Random(5)
    with elastic_job(policy()) as job:
        job.hold_behind(40)  # the kill comes before the end
        job.start(train, pace)
        diary = Diary(job)
        diary.receive_until(0, 10)
        time.sleep(chosen.random() * 0.05)
        job.ranks.kill(2 + chosen.randrange(2))
        job.let_go()
        end_of(job, [0, 1])
        diary.receive_rest()
    assert diary.states() == expected


@pytest.mark.parametrize("pace", [pytest.param("ssp:2", marks=SLOW), "async"])
def test_free_running_workers_go_on_when_a_server_is_lost(pace: str) -> None:
    with elastic_job(policy()) as job:
        job.hold_behind(40)
        job.start(train, pace)
        diary = Diary(job)
        diary.receive_until(0, 10)
        job.ranks.kill(2)
        diary.receive_until(0, 20)
        new = job.add("server", 0)
        job.let_go()
        values = end_of(job, [0, 1])
        assert [value["steps"] for value in values] == [STEPS, STEPS]
        assert job.processes[new].status in (None, 0)


@pytest.mark.parametrize("pace", ["ps", "ps[compress=onebit]"])
@pytest.mark.parametrize("lost", [0, *(pytest.param(n, marks=SLOW) for n in (1, 2))])
def test_survivors_go_on_without_a_worker_in_lockstep(lost: int, pace: str) -> None:
    with elastic_job(policy(3)) as job:
        job.hold_behind(40)
        job.start(train, pace)
        diary = Diary(job)
        diary.receive_until(lost, 10)
        job.ranks.kill(lost)
        job.let_go()
        end_of(job, [rank for rank in range(3) if rank != lost])
        diary.receive_rest()
        states = diary.states()
    assert sorted(states) == list(range(1, STEPS + 1))
    assert diary.steps[(lost + 1) % 3][STEPS][0] == 2


@pytest.mark.parametrize("pace", [*PACES, "ps[compress=dgc:0.1(momentum=0)]"])
def test_a_newcomer_reads_from_the_servers_and_takes_part(pace: str) -> None:
    with elastic_job(policy()) as job:
        job.hold_behind(100)  # it comes in before the end
        job.start(train, pace, 120)
        diary = Diary(job)
        diary.receive_until(0, 10)
        newcomer = job.add()
        job.wait_for_member(newcomer)
        job.let_go()
        diary.receive_until(newcomer, 120, 60)
        end_of(job, [0, 1, newcomer])
        diary.receive_rest()
    if pace.startswith("ps"):
        diary.states()
        assert diary.steps[0][120][0] == 3
        assert min(diary.steps[newcomer]) > 10


@pytest.mark.parametrize("pace", PACES)
def test_a_replacement_goes_on_where_the_lost_worker_was(pace: str) -> None:
    expected = undisturbed("ps") if pace == "ps" else {}
    with elastic_job(policy(on_loss="replace")) as job:
        job.hold_behind(40)
        job.start(train, pace)
        diary = Diary(job)
        diary.receive_until(1, 10)
        job.ranks.kill(1, signal.SIGKILL)
        newcomer = job.add(number=1)
        job.let_go()
        end_of(job, [0, newcomer])
        diary.receive_rest()
    if pace == "ps":
        assert diary.states() == expected


@pytest.mark.parametrize("pace", PACES)
def test_a_worker_leaves_when_it_is_asked_to(pace: str) -> None:
    with elastic_job(policy(3)) as job:
        job.hold_behind(40)
        job.start(train, pace)
        diary = Diary(job)
        diary.receive_until(0, 10)
        job.operator.scale(2)
        job.let_go()
        end_of(job, [0, 1])
        outcome = job.ranks.wait(60, [2])[0]
        diary.receive_rest()
    assert outcome.status == 0, outcome
    assert max(diary.steps[2]) < STEPS
    if pace == "ps":
        diary.states()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pace", ["ps", "ssp:2", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_many_losses_of_any_kind(pace: str, seed: int) -> None:
    chosen, steps = random.Random(seed), 400
    expected = undisturbed("ps", steps) if pace == "ps" else {}
    with elastic_job(policy(on_loss="replace")) as job:
        # The last loss comes with 80 steps to go: they must take longer than the sleep before it.
        job.start(train, pace, steps, 0.004)
        diary, workers, servers = Diary(job), [0, 1], [2, 3]
        for round_number in range(6):
            diary.receive_until(workers[0], 20 + 60 * round_number, 60)
            time.sleep(chosen.random() * 0.1)
            number, is_worker = chosen.randrange(2), chosen.random() < 0.5
            alive = workers if is_worker else servers
            job.ranks.kill(alive[number])
            alive[number] = job.add("worker" if is_worker else "server", number)
            wait_for_copies(job)
        end_of(job, workers, 120)
        diary.receive_rest()
    if pace == "ps":
        assert diary.states() == expected


def wait_for_copies(job: ElasticJob) -> None:
    """Wait until the loss of any one server can be borne again."""
    deadline_s = time.monotonic() + 60
    while True:
        membership = job.operator.status().membership
        if membership is not None and all(len(held) == 2 for held in membership.partitions):
            return
        assert time.monotonic() < deadline_s, f"no new copy: {membership}"
        time.sleep(0.02)
