"""hogwild: one copy of the parameters for all workers of a host, updated without locks."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import report, run_ranks
from support.counted import policy
from support.elastic import ElasticJob, elastic_job

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def make_model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 2))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    torch.manual_seed(5)
    for _ in range(count):
        model(torch.randn(8, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_both(group: Group, kind: str) -> None:
    del group
    plain = make_model()
    steps(plain, OPTIMIZERS[kind](plain.parameters()), 40)
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    model, optimizer = pl.distribute(model, optimizer, pace="hogwild[agree=7,bucket_mb=0.005]")
    steps(model, optimizer, 40)
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_worker_trains_as_if_alone(kind: str) -> None:
    run_ranks(1, train_both, kind)


class Sum(nn.Module):
    """Its loss is linear: whatever the parameters are, a worker's gradient is the same."""

    def __init__(self, size: int = 50) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, factor: float) -> torch.Tensor:
        return factor * self.w.sum()


def make_sum(pace: str = "hogwild") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Sum()
    return pl.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), pace=pace)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(-(1.0 + pl.rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def take_turns(group: Group) -> None:
    model, optimizer = make_sum()
    for _ in range(5):
        for turn in range(group.size):
            if turn == group.rank:
                before = model.w.detach().clone()
                step(model, optimizer)
                assert torch.equal(model.w.detach(), before + 1 + group.rank)
            group.barrier()
    everything = 5 * group.size * (group.size + 1) / 2
    assert torch.equal(model.w.detach(), torch.full((50,), everything, dtype=torch.float64))
    assert pl.check_consistency(model)


@pytest.mark.parametrize("workers", [2, 4])
def test_each_update_is_there_for_all(workers: int) -> None:
    run_ranks(workers, take_turns)


def race(group: Group, count: int) -> tuple[float, float]:
    model, optimizer = make_sum("hogwild[agree=1000]")
    group.barrier()
    for _ in range(count):
        step(model, optimizer)
    group.barrier()
    with model.agreed():
        return float(model.w.min()), float(model.w.max())


@pytest.mark.parametrize("workers", [2, 4])
def test_what_is_lost_in_races_is_little(workers: int) -> None:
    found = run_ranks(workers, race, 400)
    assert len(set(found)) == 1, "there is one copy"
    low, high = found[0]
    everything = 400 * workers * (workers + 1) / 2
    assert high <= everything
    assert low > 0.5 * everything, "more than any one worker has added"


def lookup(group: Group, count: int) -> None:
    table = nn.Embedding(3 * group.size, 4, sparse=True)
    nn.init.zeros_(table.weight)
    table, optimizer = pl.distribute(
        table, torch.optim.SGD(table.parameters(), lr=1.0), pace="hogwild"
    )
    own = torch.arange(group.size * 3)[group.rank :: group.size]
    for number in range(count):
        (-table(own[number % 3 : number % 3 + 1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    group.barrier()
    assert torch.equal(table.weight.detach(), torch.full((3 * group.size, 4), count / 3))


def test_sparse_updates_of_different_rows_lose_nothing() -> None:
    run_ranks(3, lookup, 300)


def regress(group: Group) -> tuple[float, float, torch.Tensor]:
    """Least squares; every worker has data of its own."""
    torch.manual_seed(1)
    wanted = torch.randn(8, 1)
    torch.manual_seed(100 + group.rank)
    model = nn.Linear(8, 1)
    model, optimizer = pl.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.02), pace="hogwild"
    )
    test = torch.randn(64, 8)
    begin = float((model(test) - test @ wanted).square().mean())
    for _ in range(300):
        x = torch.randn(16, 8)
        (model(x) - x @ wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.agreed(), torch.no_grad():
        return begin, float((model(test) - test @ wanted).square().mean()), flat(model)


def test_it_converges() -> None:
    found = run_ranks(4, regress)
    for begin, end, values in found:
        assert end < begin / 1000
        assert torch.equal(values, found[0][2])


def look_between(group: Group) -> None:
    """Ranks enter agreed() at different times: nobody's late update may be undone by leaving it."""
    model, optimizer = make_sum()
    for round_ in range(10):
        for turn in range(group.size):
            if turn == group.rank:
                step(model, optimizer)
            if turn != group.size - 1:
                group.barrier()
        with model.agreed():
            total = (round_ + 1) * group.size * (group.size + 1) / 2
            assert float(model.w[0]) == total
    assert float(model.w[0].detach()) == total


def test_looking_at_the_agreed_model_undoes_nothing() -> None:
    run_ranks(3, look_between)


def stop(group: Group) -> int:
    model, optimizer = make_sum("hogwild[agree=8]")
    for number in range(1, 200):
        if group.rank == 1 and number == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        step(model, optimizer)
        if pl.should_stop():
            return number
    return 0


def test_all_stop_behind_the_same_step() -> None:
    assert set(run_ranks(3, stop)) == {16}


def thaw(group: Group) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model, optimizer = pl.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), pace="hogwild"
    )
    for number in range(6):
        if number == 3:
            model[0].requires_grad_(True)
        model(torch.randn(4, 3) + group.rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    group.barrier()
    assert pl.check_consistency(model)


def test_parameters_that_are_thawed_are_shared_as_well() -> None:
    run_ranks(2, thaw)


def refuse(group: Group, words: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(pl.errors.UsageError, match=words):
        pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), pace="hogwild")
    group.barrier()


def test_several_hosts_are_refused() -> None:
    run_ranks(3, refuse, "share memory.* 2 hosts; .*async", hosts=2)


def come_and_go(group: Group) -> tuple[int, float, float]:
    """Add one to every number of one copy, rows of it sparsely, until the test says stop."""
    del group
    rows = nn.Embedding(6, 4, sparse=True, dtype=torch.float64)
    torch.nn.init.zeros_(rows.weight)
    model = nn.ModuleDict({"sum": Sum(), "rows": rows})
    model.forward = lambda: -model["sum"](1.0) - model["rows"](torch.arange(6)).sum()
    model, optimizer = pl.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), pace="hogwild[agree=3]"
    )
    taken = 0
    while not pl.should_stop():
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        report(pl.world_size())
        time.sleep(0.005)
    with model.agreed():
        return taken, float(model["sum"].w.max()), float(model["rows"].weight.max())


def wait_for(job: ElasticJob, rank: int, size: int) -> None:
    for _ in range(6):
        while job.ranks.receive(rank, 40) != size:
            pass


def test_memory_outlives_its_owner_and_newcomers_share_it() -> None:
    with elastic_job(policy(3)) as job:
        job.start(come_and_go)
        wait_for(job, 1, 3)
        job.ranks.kill(0)  # whose memory it was
        wait_for(job, 1, 2)
        newcomer = job.add()
        wait_for(job, newcomer, 3)
        job.ranks.kill(2)
        other = job.add()
        wait_for(job, other, 3)
        job.ranks.kill(1, signal.SIGTERM)
        outcomes = job.ranks.wait(60, [1, newcomer, other])
        assert [o.status for o in outcomes] == [0, 0, 0], "\n".join(map(str, outcomes))
        taken, dense, sparse = zip(*(outcome.value for outcome in outcomes), strict=True)
        assert len(set(dense)) == 1 and len(set(sparse)) == 1, "there is one copy"
        # Those who are alive have added as much in sum; races may have lost a little of it, and
        # those who were killed have added some.
        assert max(taken) < dense[0] and max(taken) < sparse[0]


def test_a_newcomer_on_another_host_makes_way() -> None:
    with elastic_job(policy(2)) as job:
        job.hosts = (0, 0, 1)
        job.start(come_and_go)
        wait_for(job, 0, 2)
        newcomer = job.add()
        (outcome,) = job.ranks.wait(60, [newcomer])
        assert outcome.status == 0 and "a newcomer must be on their host" in str(outcome)
        wait_for(job, 0, 2)
        job.ranks.kill(0, signal.SIGTERM)
        assert [o.status for o in job.ranks.wait(60, [0, 1])] == [0, 0]
