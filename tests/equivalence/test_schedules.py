"""A schedule computes what its paces compute one after the other; changing costs nothing."""

from __future__ import annotations

import os
from collections.abc import Callable

import imitation
import pytest
import torch
from imitation import DTYPE, adamw, loss_of, make_model, players, sgd

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

STEPS = 24
WORKERS = 3
TIGHT = {"rtol": 1e-10, "atol": 1e-12}  # float64; sums in another order


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adamw": adamw,
}


def flat_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(pace: str, optimizer: str, decays: bool = True) -> tuple[torch.Tensor, list[float]]:
    """Train as a worker; return its parameters, and the state of its optimizer."""
    model = make_model()
    first = list(model.parameters())
    model, stepper = pl.distribute(model, OPTIMIZERS[optimizer](model), pace=pace)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 7, gamma=0.5) if decays else None
    for step in range(STEPS):
        loss_of(model, pl.rank(), step).backward()
        stepper.step()
        stepper.zero_grad()
        if scheduler is not None:
            scheduler.step()
    assert all(a is b for a, b in zip(first, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(first, stepper.param_groups[0]["params"], strict=True))
    state = [
        float(value.double().sum())
        for _, entries in sorted(stepper.state_dict()["state"].items())
        for _, value in sorted(entries.items())
        if isinstance(value, torch.Tensor)
    ]
    return flat_of(model), state


def train_all(group: Group, paces: list[str]) -> list[tuple[torch.Tensor, list[float]]]:
    del group
    return [train(pace, name) for name in OPTIMIZERS for pace in paces]


LOCKSTEP = [
    "allreduce[update=replicated]",
    "allreduce@0, ps@5",
    "ps@0, allreduce@7",
    "allreduce[update=sharded]@0, allreduce[update=replicated]@6, ps@11, ps[wait=layer]@12,"
    " allreduce@17",
    "ps@0, ps[bucket_mb=0.001]@3, allreduce[bucket_mb=0.001]@9",
]


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0, 0], [0, 1, 1, 0, 1]], ids=["one host", "two hosts"])
def test_paces_in_lockstep_may_follow_each_other(hosts: list[int]) -> None:
    """They all compute the same, so changing among them equals never having changed."""
    by_rank = run_ranks(WORKERS, train_all, LOCKSTEP, servers=2, hosts=hosts, timeout_s=100)
    for results in by_rank:
        for number, name in enumerate(OPTIMIZERS):
            plain, *others = results[number * len(LOCKSTEP) :][: len(LOCKSTEP)]
            for pace, found in zip(LOCKSTEP[1:], others, strict=True):
                case = f"{pace}, {name}"
                torch.testing.assert_close(found[0], plain[0], **TIGHT, msg=case)
                assert found[1] == pytest.approx(plain[1], rel=1e-9, abs=1e-12), case


def test_there_and_back_again_is_never_having_gone() -> None:
    """Where one local step is an averaged gradient: without momentum."""
    by_rank = run_ranks(WORKERS, _there_and_back, servers=1)
    for plain, local, both in by_rank:
        torch.testing.assert_close(local, plain, **TIGHT)
        torch.testing.assert_close(both, plain, **TIGHT)


def _there_and_back(group: Group) -> list[torch.Tensor]:
    del group
    paces = ("allreduce", "local:1", "allreduce@0, local:1@4, allreduce@9, local:1@15")
    return [train(pace, "sgd")[0] for pace in paces]


def _local_then_together(group: Group) -> list[torch.Tensor]:
    del group
    pace = "local:6@0, allreduce@9, diloco:6@15"
    return [train(pace, name, decays=False)[0] for name in ("sgd", "momentum", "adamw")]


@pytest.fixture(scope="module", params=[0, 1], ids=["no servers", "a server"])
def local_then_together(request: pytest.FixtureRequest) -> list[list[torch.Tensor]]:
    return run_ranks(WORKERS, _local_then_together, servers=request.param)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_a_block_ends_where_the_next_pace_begins(
    local_then_together: list[list[torch.Tensor]], name: str
) -> None:
    found = local_then_together
    team = players(WORKERS, OPTIMIZERS[name])
    imitation.outer(team, 6, every=6, lr=1.0, momentum=0.0, nesterov=False)
    for step in (6, 7, 8):
        for player in team:
            player.step(step)
    _bring_together(team)
    for step in range(9, 15):
        imitation.together(team, step)
    begin = team[0].flat
    for step in range(15, 21):
        for player in team:
            player.step(step)
    mean = torch.stack([player.flat for player in team]).mean(0)
    change = 0.7 * (mean - begin)
    for player in team:
        player.put(begin + change + 0.9 * change)
    for step in range(21, STEPS):
        for player in team:
            player.step(step)
    number = ["sgd", "momentum", "adamw"].index(name)
    for player, results in zip(team, found, strict=True):
        torch.testing.assert_close(results[number], player.flat, **TIGHT, msg=name)


def _bring_together(team: list[imitation.Player]) -> None:
    """Give everybody the mean of all parameters, and of what the optimizers remember."""
    mean = torch.stack([player.flat for player in team]).mean(0)
    states = [player.optimizer.state for player in team]
    for each in zip(*(list(player.model.parameters()) for player in team), strict=True):
        for key in states[0][each[0]]:
            values = [state[param][key] for state, param in zip(states, each, strict=True)]
            together = torch.stack([v.to(DTYPE) for v in values]).mean(0)
            for value in values:
                value.copy_(together)
    for player in team:
        player.put(mean)


# All workers write to one memory of the host, so it is refused on a device.
HOGWILD = () if "TEST_ON_DEVICE" in os.environ else ("hogwild@0, local:3@8",)
FREE_RUNNING = (
    *HOGWILD,
    *("async@0, allreduce@8", "ssp:2@0, local:3@8", "easgd:3[mode=async]@0, ps@8"),
    *("backup:1@0, allreduce@8", "gossip@0, async@8, ps@16"),
)


def _free_running(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for pace in FREE_RUNNING:
        model = make_model()
        model, optimizer = pl.distribute(model, momentum(model), pace=pace)
        for step in range(16):
            loss_of(model, pl.rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 7:
                at_change = flat_of(model)
        with model.agreed():
            found.append((at_change, flat_of(model)))
        group.barrier()
    return found


def test_free_running_workers_agree_when_they_change() -> None:
    by_rank = run_ranks(WORKERS, _free_running, servers=1)
    for number in range(len(FREE_RUNNING)):
        changed, ended = zip(*(results[number] for results in by_rank), strict=True)
        assert all(torch.equal(changed[0], other) for other in changed[1:]), number
        assert all(torch.equal(ended[0], other) for other in ended[1:]), number
        assert not torch.equal(changed[0], ended[0])
