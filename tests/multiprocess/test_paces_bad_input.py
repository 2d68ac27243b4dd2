"""Paces that cannot work: the same clear error on every rank, before anything is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

WRONG = {
    "local:7[fragments=2]": "7 steps cannot be divided into 2 fragments; .* a multiple of 2",
    "diloco:8[fragments=2,delay=4]": "a delay of 4 steps, expected less than the 4 steps",
    "diloco:8[merge=1.5]": "merge=1.5, expected 0 to 1",
    "local:8[late=shift]": "give a delay, such as delay=1",
    "local:8[delay=2,late=shift,merge=0.5]": "leave out merge",
    "diloco:8[compress=dgc]": "averages models, and compress=dgc cannot be used on them",
    "allreduce[compress=inte8]": "did you mean int8",
    "partial:0.5[compress=int8]": "partial has no option 'compress'",
    "bmuf:8[momentum=1]": "momentum=1, expected less than 1",
    "easgd:4[alpha=1]": "expected alpha < 1",
    "partial:0.5[carry=yes,skip_compute=yes]": "has nothing to carry over; choose one",
    "easgd:4[mode=async]": "easgd:4.mode=async. needs parameter servers, and this job has none",
    "bitmap[momentum=1]": "momentum=1, expected less than 1; 0 votes with the gradients",
}


def refuse(group: Group) -> None:
    for pace, words in WRONG.items():
        model = nn.Linear(2, 1)
        with pytest.raises(pl.errors.UsageError, match=words):
            pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), pace=pace)
    model = nn.Linear(2, 1)
    with pytest.raises(pl.errors.UsageError, match="gives SGD a momentum, .* AdamW"):
        pl.distribute(model, torch.optim.AdamW(model.parameters()), pace="eamsgd:4")
    for optimizer, words in (
        (torch.optim.AdamW(model.parameters()), "AdamW. has its own state"),
        (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "SGD. has its own momentum"),
    ):
        with pytest.raises(pl.errors.UsageError, match=words):
            pl.distribute(model, optimizer, compress="dgc")
    with pytest.raises(pl.errors.UsageError, match="write name"):
        pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), compress=8)
    table = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(pl.errors.UsageError, match="weight .* has sparse gradients"):
        pl.distribute(table, torch.optim.SGD(table.parameters(), lr=0.1), pace="local:4")
    group.barrier()  # nobody is left waiting


def refuse_servers(group: Group) -> None:
    for pace, words in {
        "gossip:ring": "exchange with their neighbours only, so there is no centre",
        "partial:0.5": "average gradients among themselves",
    }.items():
        model = nn.Linear(2, 1)
        with pytest.raises(pl.errors.UsageError, match=words):
            pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), pace=pace)
    group.barrier()


def test_paces_without_a_centre_refuse_servers() -> None:
    run_ranks(2, refuse_servers, servers=1)


def test_wrong_options_are_refused_on_every_rank() -> None:
    run_ranks(2, refuse)


def step_once(group: Group) -> float:
    """A script that clips, accumulates and skips steps, at a pace of local steps."""
    del group
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, optimizer, pace="local:3")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    for step in range(9):
        for part in range(2):
            x = torch.full((4, 4), float(pl.rank() + step)) + torch.randn(4, 4)
            if part == 0:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        schedule.step()
    pl.check_consistency(model)  # 9 is a multiple of 3; running statistics are averaged as well
    return float(sum(p.detach().sum() for p in model.parameters()))


def test_what_scripts_do_works_at_a_pace_of_local_steps() -> None:
    first, second = run_ranks(2, step_once)
    assert first == second
