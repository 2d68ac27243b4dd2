"""A pace with a centre computes the same with the centre on servers as without servers."""

from __future__ import annotations

import imitation
import pytest
import torch
from imitation import adamw, sgd
from torch import nn
from ways import centre_reports

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime import job
from support import run_ranks, started

STEPS = 24
WIDTH = 200  # so that the middle is cut in two: less than 64 KB is not
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}

PACES = (
    *("local:6", "local:6[merge=0.25]", "local:6[delay=2]", "post_local:4[after=8]"),
    *("bmuf:4[after=4]", "bmuf:4[after=0,nesterov=no]", "bmuf:4[after=0,outer_lr=0.8]"),
    *("bmuf:4[after=0,compat=fairseq]", "bmuf:4[after=0,compat=fairseq,nesterov=no]"),
    *("diloco:6", "diloco:6[nesterov=no]", "diloco:6[outer_lr=1,momentum=0]"),
    *("diloco:6[delay=2]", "diloco:6[delay=2,merge=0.5]"),
    *("diloco:6[fragments=3,bucket_mb=0.001]", "diloco:8[fragments=2,delay=3,bucket_mb=0.001]"),
    *("easgd:4", "easgd:1[alpha=0.2,beta=1]", "easgd:4[alpha=0]", "easgd:3[bucket_mb=0.001]"),
    "eamsgd:4",
)

MEETINGS = {"local:6": 4, "easgd:4": 6, "bmuf:4[after=4]": 5, "diloco:6[delay=2]": 3}

Flat = torch.Tensor


def flat(model: nn.Module) -> Flat:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(pace: str, optimizer: str, dtype: torch.dtype) -> list[Flat]:
    """Train as a worker; return its parameters, and those that stand for all."""
    torch.manual_seed(3)
    middle = (nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(nn.Linear(6, WIDTH), *middle, nn.Linear(WIDTH, 3)).to(dtype)
    if optimizer == "adamw" and pace.startswith("eamsgd"):
        optimizer = "sgd"
    model, stepper = pl.distribute(model, OPTIMIZERS[optimizer](model), pace=pace)
    for step in range(STEPS):
        x, y = imitation.batch_of(pl.rank(), step)
        nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
        stepper.step()
        stepper.zero_grad()
    found = [flat(model)]
    with model.agreed():
        found.append(flat(model))
    return found


def train_all(group: Group, optimizer: str, dtype: torch.dtype) -> dict[str, list[Flat]]:
    found = {}
    for number, pace in enumerate(PACES):
        found[pace] = train(pace, optimizer, dtype)
        group.barrier()
        if job.current().servers:
            reports = centre_reports(number)
            assert len({report.server for report in reports}) == len(job.current().servers)
            assert {r.version for r in reports} == {MEETINGS.get(pace)} or pace not in MEETINGS
    return found


@pytest.mark.parametrize(
    ("workers", "servers", "hosts", "optimizer", "dtype"),
    [
        (2, 1, 1, "sgd", torch.float64),
        (3, 2, 1, "adamw", torch.float64),
        (3, 2, 2, "sgd", torch.float32),
        pytest.param(4, 2, 1, "sgd", torch.float32, marks=pytest.mark.slow),
        pytest.param(1, 1, 1, "sgd", torch.float64, marks=pytest.mark.slow),
    ],
)
def test_a_centre_on_servers_is_the_same(
    workers: int, servers: int, hosts: int, optimizer: str, dtype: torch.dtype
) -> None:
    central = run_ranks(workers, train_all, optimizer, dtype, servers=servers, hosts=hosts)
    apart = run_ranks(workers, train_all, optimizer, dtype)
    close = 1e-10 if dtype is torch.float64 else 1e-6  # another order of the same operations
    for rank, (found, expected) in enumerate(zip(central, apart, strict=True)):
        for pace in PACES:
            for one, other in zip(found[pace], expected[pace], strict=True):
                error = (one - other).norm() / other.norm()
                assert error < close, f"{pace} on {rank}: {error}"
    for pace in PACES:  # all read the same bits
        agreed = [found[pace][1] for found in central]
        assert all(torch.equal(agreed[0], other) for other in agreed[1:]), pace


def train_once(group: Group) -> None:
    del group
    train("diloco:6", "sgd", torch.float32)


def test_the_line_at_the_start_says_where_the_centre_is() -> None:
    with started(2, train_once, servers=2) as ranks:
        outcomes = ranks.wait(60)
    assert "centre on 2 servers" in outcomes[0].output, outcomes[0]
