"""Elastic averaging in which nobody waits: what one worker computes, and what all have moved."""

from __future__ import annotations

import random
import time

import pytest
import torch
from imitation import DTYPE, Player, loss_of, make_model, players, sgd
from torch import nn
from ways import centre_reports

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

STEPS = 23
EVERY = 4

Flat = torch.Tensor


def flat(model: nn.Module) -> Flat:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(pace: str, rate: float = 0.05, noise: float = 0.0, pause_s: float = 0.0) -> dict:
    """Train as a worker; return its values, and the centre, before and after."""
    model = make_model()
    if noise:  # large enough to be cut over two servers
        model.append(nn.Linear(3, 8000)).append(nn.Linear(8000, 3)).to(DTYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    centre = flat(model)
    torch.manual_seed(pl.rank())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=noise)
    before, chance = flat(model), random.Random(pl.rank())
    for step in range(STEPS):
        loss_of(model, pl.rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(chance.random() * pause_s)
    after = flat(model)
    with model.agreed():
        moved = flat(model)
    assert torch.equal(after, flat(model))
    updates = {w.worker: w.updates for report in centre_reports() for w in report.workers}
    return {"before": (centre, before), "after": (moved, after), "updates": updates}


def train_alone(group: Group) -> list[dict]:
    del group
    return [train(f"easgd:{EVERY}[mode=async,alpha=0.3]"), train(f"eamsgd:{EVERY}[mode=async]")]


def imitate(player: Player, alpha: float) -> Flat:
    """Move worker and centre by the same d; return the centre."""
    centre = player.flat.clone()
    for step in range(STEPS):
        is_time = (step + 1) % EVERY == 0
        if is_time:
            difference = (player.flat - centre) * alpha
            centre = centre + difference
        player.step(step)
        if is_time:
            player.put(player.flat - difference)
    return centre


def test_one_worker_computes_the_formula() -> None:
    ((plain, with_momentum),) = run_ranks(1, train_alone, servers=1)
    (player,) = players(1, sgd)
    centre = imitate(player, 0.3)
    assert torch.equal(plain["after"][1], player.flat)
    assert torch.equal(plain["after"][0], centre)
    assert plain["updates"] == {0: STEPS // EVERY}

    (player,) = players(
        1, lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    )
    centre = imitate(player, 0.45)  # beta / 2, as if there were a second worker
    torch.testing.assert_close(with_momentum["after"][1], player.flat, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(with_momentum["after"][0], centre, rtol=1e-10, atol=1e-12)


def train_without_gradients(group: Group) -> dict:
    del group
    pace = f"easgd:{EVERY}[mode=async,alpha=0.2,bucket_mb=0.001]"
    return train(pace, rate=0.0, noise=1.0, pause_s=0.01)


@pytest.mark.parametrize(("workers", "servers", "hosts"), [(3, 2, 1), (3, 1, 2)])
def test_what_workers_give_the_centre_gets_once(workers: int, servers: int, hosts: int) -> None:
    """Without gradients only springs move anything: the sum over workers and centre stays."""
    found = run_ranks(workers, train_without_gradients, servers=servers, hosts=hosts)
    centre_before, centre_after = found[0]["before"][0], found[0]["after"][0]
    given = sum(one["before"][1] - one["after"][1] for one in found)
    assert given.abs().max() > 0.1, "nobody has moved"
    torch.testing.assert_close(centre_after - centre_before, given, rtol=1e-9, atol=1e-12)
    for one in found:
        assert torch.equal(one["after"][0], centre_after), "all see one centre"
        assert one["updates"] == dict.fromkeys(range(workers), STEPS // EVERY)
