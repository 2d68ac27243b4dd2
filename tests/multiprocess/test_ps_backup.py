"""Backup workers: a round goes on without the slowest, and the slowest goes on with the others."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.ps import messages as m
from paceline.runtime import job
from support import receive, report, run_ranks, started

ROUNDS = 12


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batch(worker: int, step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(8, 6, generator=chance)


def loss(model: nn.Module, worker: int, step: int) -> torch.Tensor:
    x = batch(worker, step)
    return (model(x) - x[:, :3]).square().mean()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def counts() -> dict[int, tuple[int, int]]:
    """Return by worker: how many of its gradients were applied, and dropped."""
    (link,) = job.current().servers
    (table,) = link.ask(m.Stats).wait().reports
    return {one["worker"]: (one["updates"], one["dropped"]) for one in table["workers"]}


def train_with_a_sleeper(group: Group, pace: str) -> dict:
    """All take as many steps of their own; worker 2 sleeps in the middle of its first one."""
    model, optimizer = make()
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    seen = []
    for step in range(ROUNDS):
        value = loss(model, pl.rank(), step)
        if step == 0 and pl.rank() == 2:
            receive()  # nobody is held up by this
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat(model))
    report("through")
    group.barrier()  # the others wait here while the sleeper takes its steps
    return {"seen": seen, "counts": counts()}


def test_nobody_waits_for_the_sleeper_and_its_old_gradient_is_dropped() -> None:
    model, optimizer = make()
    expected = []
    for step in range(ROUNDS):
        (sum(loss(model, worker, step) for worker in (0, 1)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(flat(model))
    with started(3, train_with_a_sleeper, "backup:1", servers=1) as ranks:
        assert [ranks.receive(rank, 60) for rank in (0, 1)] == ["through", "through"]
        ranks.send(2, "wake up")
        found = [outcome.value for outcome in ranks.wait(50)]
    for rank in (0, 1):
        for step in range(ROUNDS):
            torch.testing.assert_close(found[rank]["seen"][step], expected[step])
    for values in found[2]["seen"]:  # of whose steps none counted: they are all old
        assert torch.equal(values, found[0]["seen"][-1])
    assert found[0]["counts"] == {0: (ROUNDS, 0), 1: (ROUNDS, 0), 2: (0, ROUNDS)}


def train_unevenly(group: Group, pace: str) -> dict:
    """Everybody is slow now and then; scripts clip what they see."""
    model, optimizer = make()
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    chance = random.Random(pl.rank())
    losses = []
    for step in range(30):
        time.sleep(chance.choice((0.0, 0.0, 0.002, 0.02)))
        value = loss(model, pl.rank(), step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    group.barrier()
    model.pull()
    return {"model": flat(model), "counts": counts(), "losses": losses}


@pytest.mark.parametrize(("workers", "pace", "hosts"), [(4, "backup:1", 1), (3, "backup:2", 2)])
def test_uneven_workers_come_through_with_one_model(workers: int, pace: str, hosts: int) -> None:
    found = run_ranks(workers, train_unevenly, pace, servers=1, hosts=hosts)
    assert all(torch.equal(found[0]["model"], other["model"]) for other in found[1:])
    assert all(sum(both) == 30 for both in found[0]["counts"].values()), found[0]["counts"]
    assert sum(sum(one["losses"][-5:]) for one in found) < sum(sum(o["losses"][:5]) for o in found)


def train_plainly(group: Group, pace: str) -> list[torch.Tensor]:
    del group
    model, optimizer = make()
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    seen = []
    for step in range(ROUNDS):
        loss(model, pl.rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat(model))
    return seen


def test_no_backups_are_lockstep_to_the_bit() -> None:
    plain = run_ranks(3, train_plainly, "ps", servers=2)
    found = run_ranks(3, train_plainly, "backup:0", servers=2)
    for one, other in zip(plain, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refuse(group: Group, pace: str, words: str) -> None:
    model, optimizer = make()
    with pytest.raises(pl.errors.UsageError, match=words):
        pl.distribute(model, optimizer, pace=pace)
    group.barrier()


@pytest.mark.parametrize(
    ("pace", "servers", "words"),
    [
        ("backup:2", 1, "2 backups of 2 workers leave no worker to wait for; .* backup:1"),
        ("backup:1", 0, "backup:1 needs parameter servers, .* -n 2 -s 1 --pace backup"),
        ("backup:1", 2, "one server must decide which workers are in a round; use -s 1"),
    ],
)
def test_what_cannot_be_is_refused(pace: str, servers: int, words: str) -> None:
    run_ranks(2, refuse, pace, words, servers=servers)
