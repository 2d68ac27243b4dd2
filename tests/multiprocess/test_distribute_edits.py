"""Scripts that change parameters themselves, between steps: as if every worker had its own copy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline as pl
from support import run_ranks


def make(update: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pl.distribute(model, optimizer, update=update, bucket_mb=0.003)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(6, 20, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


def shrink_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


def replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def reload(model: nn.Module) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


EDITS = {f.__name__: f for f in (shrink, shrink_data, replace_data, reload)}


def run(group, update: str, edit: str | None) -> list[torch.Tensor]:
    model, optimizer = make(update)
    for step in range(6):
        train(model, optimizer, step)
        if edit is not None and step in (1, 2, 4):
            before = [param.detach().clone() for param in model.parameters()]
            EDITS[edit](model)
            assert all(
                torch.equal(p, 0.5 * q) for p, q in zip(model.parameters(), before, strict=True)
            )
    pl.check_consistency(model, optimizer)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_edit_counts_once_however_many_workers_make_it(num_ranks):
    def body(group):
        plain = run(group, "replicated", "shrink")
        untouched = run(group, "replicated", None)
        assert not torch.equal(plain[0], untouched[0])
        for edit in EDITS:
            edited = run(group, "sharded", edit)
            assert all(torch.equal(p, q) for p, q in zip(plain, edited, strict=True)), edit

    run_ranks(num_ranks, body)


def test_one_rank_may_swap_weights_for_its_evaluation():
    def body(group):
        expected = run(group, "replicated", None)
        model, optimizer = make("sharded")
        average = copy.deepcopy(model)
        for step in range(6):
            train(model, optimizer, step)
            if group.rank == 0:
                kept = copy.deepcopy(model.state_dict())
                model.load_state_dict({k: torch.zeros_like(v) for k, v in kept.items()})
                assert not model(torch.ones(1, 20)).any()
                model.load_state_dict(kept)
        assert average(torch.ones(1, 20)).shape == (1, 5)
        assert all(torch.equal(p, q) for p, q in zip(expected, model.parameters(), strict=True))
        pl.check_consistency(model, optimizer)

    run_ranks(2, body)
