"""Every pace computes what its formula says, and special cases of one pace are another."""

from __future__ import annotations

import random
from collections.abc import Callable

import imitation
import pytest
import torch
from imitation import adamw, loss_of, make_model, players, sgd

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

STEPS = 24
WORKERS = 3
TIGHT = {"rtol": 1e-10, "atol": 1e-12}  # float64; sums in another order
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}

Flat = torch.Tensor


def train(group: Group, pace: str, optimizer: str = "sgd", steps: int = STEPS) -> Flat:
    """Train as a worker; return its parameters."""
    del group
    model = make_model()
    model, stepper = pl.distribute(model, OPTIMIZERS[optimizer](model), pace=pace)
    for step in range(steps):
        loss_of(model, pl.rank(), step).backward()
        stepper.step()
        stepper.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train_all(group: Group, cases: list[tuple[str, str]]) -> list[Flat]:
    return [train(group, *case) for case in cases]


def trained(cases: list[tuple[str, str]], hosts: int = 1) -> list[list[Flat]]:
    """Return by case, by worker."""
    by_rank = run_ranks(WORKERS, train_all, cases, hosts=hosts)
    return [[results[number] for results in by_rank] for number in range(len(cases))]


def require_close(found: list[Flat], team: list[imitation.Player], case: object) -> None:
    for flat, player in zip(found, team, strict=True):
        torch.testing.assert_close(flat, player.flat, **TIGHT, msg=f"{case}, {player.number}")


@pytest.mark.parametrize("hosts", [1, 2])
def test_outer_steps(hosts: int) -> None:
    block = {"lr": 1.0, "momentum": 1 - 1 / WORKERS}
    cases: dict[str, dict[str, object]] = {
        "local:6": {"every": 6, "lr": 1.0, "momentum": 0.0, "nesterov": False},
        "post_local:4[after=8]": {
            **{"every": 4, "lr": 1.0, "momentum": 0.0, "nesterov": False, "after": 8}
        },
        "bmuf:4[after=4]": {"every": 4, **block, "nesterov": True, "after": 4},
        "bmuf:4[after=0,nesterov=no]": {"every": 4, **block, "nesterov": False},
        "diloco:6": {"every": 6, "lr": 0.7, "momentum": 0.9, "nesterov": True},
        "diloco:8[fragments=1,bucket_mb=0.001]": {
            **{"every": 8, "lr": 0.7, "momentum": 0.9, "nesterov": True}
        },
    }
    pairs = [(pace, name) for pace in cases for name in OPTIMIZERS]
    for (pace, name), found in zip(pairs, trained(pairs, hosts), strict=True):
        team = players(WORKERS, OPTIMIZERS[name])
        imitation.outer(team, STEPS, **cases[pace])  # type: ignore[arg-type]
        require_close(found, team, (pace, name))


def test_streaming() -> None:
    cases = {
        "diloco:6[delay=2]": {"every": 6, "delay": 2, "merge": 0.0},
        "diloco:6[delay=2,merge=0.5]": {"every": 6, "delay": 2, "merge": 0.5},
        "diloco:6[delay=5,late=shift]": {"every": 6, "delay": 5, "shifts": True},
        "local:4[delay=3,late=shift]": {
            "every": 4,
            "delay": 3,
            "shifts": True,
            "outer_lr": 1.0,
            "momentum": 0.0,
        },
    }
    found = trained([(pace, "sgd") for pace in cases])
    for (pace, options), values in zip(cases.items(), found, strict=True):
        team = players(WORKERS, sgd)
        imitation.streaming(team, STEPS, **options)  # type: ignore[arg-type]
        require_close(values, team, pace)


def test_block_momentum_as_fairseq_has_it() -> None:
    (found,) = trained([("bmuf:4[after=0,compat=fairseq,momentum=0.6]", "sgd")])
    team = players(WORKERS, sgd)
    imitation.fairseq_blocks(team, STEPS, 4, momentum=0.6)
    require_close(found, team, "fairseq")


def look_at_the_agreed(group: Group) -> list[list[Flat]]:
    """Return what stands for all workers, what this one has, and what it has afterwards."""
    del group
    found = []
    for pace in ("allreduce", "local:5", "diloco:5", "easgd:5"):
        model = make_model()
        model, optimizer = pl.distribute(model, sgd(model), pace=pace)
        for step in range(STEPS):
            loss_of(model, pl.rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        flats = [torch.cat([p.detach().flatten() for p in model.parameters()])]
        with model.agreed():
            flats.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        flats.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        found.append(flats)
    return found


def test_the_model_that_stands_for_all() -> None:
    by_rank = run_ranks(WORKERS, look_at_the_agreed)
    for number, pace in enumerate(("allreduce", "local:5", "diloco:5", "easgd:5")):
        before, agreed, after = zip(*(results[number] for results in by_rank), strict=True)
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other), pace
        assert all(torch.equal(agreed[0], other) for other in agreed[1:]), pace
        is_same = torch.equal(before[0], before[1])
        assert is_same == (pace == "allreduce"), "behind the last meeting each has its own"
    mean = torch.stack([results[1][0] for results in by_rank]).mean(0)
    torch.testing.assert_close(by_rank[0][1][1], mean, **TIGHT)
    team = players(WORKERS, sgd)
    centre = imitation.elastic_averaging(team, STEPS, 5, alpha=0.3, beta=0.9)
    torch.testing.assert_close(by_rank[0][3][1], centre, **TIGHT)


def train_with_momentum(group: Group) -> Flat:
    return train(group, "eamsgd:4")


def test_elastic_averaging_with_momentum() -> None:
    """With torch's Nesterov SGD the parameters are the look-ahead x + d v of the paper."""
    found = run_ranks(WORKERS, train_with_momentum)
    rate, momentum, alpha, beta = 0.05, 0.9, 0.3, 0.9
    team = players(WORKERS, sgd)
    places = [player.flat.clone() for player in team]  # x
    speeds = [torch.zeros_like(place) for place in places]  # v
    centre = places[0].clone()
    for step in range(STEPS):
        before = [x + momentum * v for x, v in zip(places, speeds, strict=True)]
        for number, player in enumerate(team):
            player.put(before[number])
            speeds[number] = momentum * speeds[number] - rate * player.backward(step)
            places[number] = places[number] + speeds[number]
            if (step + 1) % 4 == 0:
                places[number] = places[number] - alpha * (before[number] - centre)
        if (step + 1) % 4 == 0:
            centre = (1 - beta) * centre + beta * imitation.mean(before)
    for flat, x, v in zip(found, places, speeds, strict=True):
        torch.testing.assert_close(flat, x + momentum * v, **TIGHT)


def test_one_pace_is_another() -> None:
    same = [
        ("allreduce", "local:1"),
        ("allreduce", "partial:1"),
        ("local:6", "bmuf:6[after=0,momentum=0]"),
        ("local:6", "diloco:6[outer_lr=1,momentum=0]"),
        ("bmuf:4[after=0,momentum=0.5,outer_lr=0.8]", "diloco:4[momentum=0.5,outer_lr=0.8]"),
        ("diloco:6", "diloco:6[fragments=1,delay=0]"),
        ("local:24", "easgd:4[alpha=0]"),  # the first one meets behind the last step only
    ]
    paces = sorted({pace for pair in same for pace in pair})
    found = dict(zip(paces, trained([(pace, "sgd") for pace in paces]), strict=True))
    for one, other in same[:-1]:
        for a, b in zip(found[one], found[other], strict=True):
            torch.testing.assert_close(a, b, **TIGHT, msg=f"{one} {other}")
    independent = players(WORKERS, sgd)
    for step in range(STEPS):
        for player in independent:
            player.step(step)
    require_close(found["easgd:4[alpha=0]"], independent, "alpha=0")


def test_elastic_averaging() -> None:
    options = {"easgd:4": (4, 0.3, 0.9), "easgd:1[alpha=0.2,beta=1]": (1, 0.2, 1.0)}
    pairs = [(pace, name) for pace in options for name in OPTIMIZERS]
    for (pace, name), found in zip(pairs, trained(pairs), strict=True):
        team = players(WORKERS, OPTIMIZERS[name])
        every, alpha, beta = options[pace]
        imitation.elastic_averaging(team, STEPS, every, alpha=alpha, beta=beta)
        require_close(found, team, (pace, name))


def test_partial_participation() -> None:
    def drawn(step: int) -> list[int]:
        return random.Random(f"0 {step}").sample(range(WORKERS), 2)

    def turns(step: int) -> list[int]:
        return [(2 * step + i) % WORKERS for i in range(2)]

    cases: dict[str, tuple[Callable[[int], list[int]], bool]] = {
        "partial:0.6": (drawn, False),
        "partial:0.6[skip_compute=yes]": (drawn, False),
        "partial:0.6[select=round_robin]": (turns, False),
        "partial:0.6[carry=yes]": (drawn, True),
        "elastic_sgd:0.6": (drawn, False),
    }
    found = trained([(pace, "sgd") for pace in cases])
    for (pace, (chosen, carries)), values in zip(cases.items(), found, strict=True):
        team = players(WORKERS, sgd)
        imitation.partial(team, chosen, STEPS, carries=carries)
        require_close(values, team, pace)


def test_gossip() -> None:
    def ring(me: int, step: int) -> list[int]:
        del step
        return [(me - 1) % WORKERS, (me + 1) % WORKERS]

    def exponential(me: int, step: int) -> list[int]:
        return [(me - [1, 2][step % 2]) % WORKERS]

    def pairs(me: int, step: int) -> list[int]:
        order = random.Random(f"0 {step}").sample(range(WORKERS), WORKERS)
        partner = order.index(me) ^ 1
        return [order[partner]] if partner < WORKERS else []

    cases = {"gossip": ring, "gossip:exponential": exponential, "gossip:random": pairs}
    for (pace, heard), found in zip(
        cases.items(), trained([(pace, "sgd") for pace in cases]), strict=True
    ):
        team = players(WORKERS, sgd)
        imitation.gossip(team, heard, STEPS)
        require_close(found, team, pace)
