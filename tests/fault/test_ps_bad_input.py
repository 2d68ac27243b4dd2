"""Training through servers with gradients, models and optimizers that are not right."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.errors import NonFiniteGradient, UsageError
from support import run_ranks

BAD_WORKER = 1


def train_with_a_nan(group: Group, pace: str) -> tuple[bool, str, list[float]]:
    """Make three steps; one worker's gradient is NaN in the second. Return whether all values are
    finite, what was said, and the values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), pace=pace)
    said = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.ones(2, 6)
            if step == 1 and group.rank == BAD_WORKER:
                x[0, 0] = math.nan
            try:
                model(x).sum().backward()
                optimizer.step()
            except NonFiniteGradient as error:
                said += str(error)
            optimizer.zero_grad()
    group.barrier()
    model.pull()
    said += "; ".join(str(warning.message) for warning in caught)
    values = nn.utils.parameters_to_vector(model.parameters())
    return bool(values.isfinite().all()), said, values.tolist()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("policy", ["raise", "skip", "quarantine"])
@pytest.mark.parametrize("pace", ["ps", "async", "ssp:1"])
def test_a_nan_is_kept_out_and_its_worker_is_named(pace: str, policy: str, servers: int) -> None:
    results = run_ranks(2, train_with_a_nan, f"{pace}[nonfinite={policy}]", servers=servers)
    assert all(is_finite for is_finite, _, _ in results), results
    assert results[0][2] == results[1][2]
    # In lockstep the step concerns everybody; else only the worker whose update it is.
    hears = "".join(said for _, said, _ in results) if pace == "ps" else results[BAD_WORKER][1]
    assert f"worker {BAD_WORKER}: " in hears, results
    assert "shard" in hears and "weight" in hears, results
    if pace != "ps":
        assert results[0][1] == "", results


@pytest.mark.parametrize("policy", ["raise", "skip", "quarantine"])
def test_a_nan_on_one_server_keeps_the_others_from_their_half(policy: str) -> None:
    def body(_group: Group, pace: str) -> bool:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = pl.distribute(model, optimizer, pace=pace, bucket_mb=0.01)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        model[0].weight.register_hook(lambda grad: grad * math.nan)
        with warnings.catch_warnings(), contextlib.suppress(NonFiniteGradient):
            warnings.simplefilter("ignore")
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        model.pull()
        return torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)

    assert run_ranks(1, body, f"async[nonfinite={policy}]", servers=2) == [True]


def test_optimizers_that_servers_cannot_run() -> None:
    def body(_group: Group) -> str:
        model = nn.Linear(4, 2)
        with pytest.raises(UsageError) as caught:
            pl.distribute(model, torch.optim.LBFGS(model.parameters()), pace="ps")
        return str(caught.value)

    one, other = run_ranks(2, body, servers=1)
    assert one == other and "LBFGS" in one and "use an optimizer without closure" in one


def test_two_models_train_on_the_same_servers() -> None:
    def body(_group: Group) -> list[float]:
        losses = []
        pairs = []
        for pace in ("ps", "async"):
            torch.manual_seed(0)
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            pairs.append(pl.distribute(model, optimizer, pace=pace))
        for _ in range(30):
            losses.clear()
            for model, optimizer in pairs:
                x = torch.randn(16, 4)
                loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    for losses in run_ranks(2, body, servers=2):
        assert max(losses) < 2.0


def test_a_model_is_distributed_once() -> None:
    def body(_group: Group) -> str:
        model = nn.Linear(4, 2)
        model, optimizer = pl.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), pace="async"
        )
        with pytest.raises(UsageError) as caught:
            pl.distribute(model, optimizer, pace="async")
        return str(caught.value)

    one, other = run_ranks(2, body, servers=1)
    assert "distribute" in one and one == other


@pytest.mark.parametrize("pace", ["ps", "async"])
def test_more_servers_than_parameters(pace: str) -> None:
    def body(_group: Group, pace: str) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = pl.distribute(model, optimizer, pace=pace)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        pl.world().barrier()
        model.pull()
        return model.weight.item()

    assert run_ranks(2, body, pace, servers=3) == [-1.0 if pace == "ps" else -2.0] * 2
