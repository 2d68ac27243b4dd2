"""Backward through a distributed model: every way in which gradients can come about."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from against_one_process import UPDATES, Pair, adam, loss, mlp, rows, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime import job
from support import run_ranks

# -- in the ranks ---------------------------------------------------------------------------------


def averages_and_clipping(group: Group, update: str) -> None:
    for limit in (0.01, 100.0):
        pair = Pair(group, mlp(), adam, update)
        for step in range(3):
            x = rows(group, seed=step)
            norms = []
            for model, optimizer, is_ours in pair.both():
                optimizer.zero_grad()
                loss(model, pair.mine(x) if is_ours else x).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit))
                optimizer.step()
            assert torch.allclose(*norms, rtol=1e-10)
            pair.require_same_gradients("clipped")
            pair.require_same_parameters()
    # Values may be replaced altogether, and none at all is a step too.
    for model, optimizer, _ in pair.both():
        for param in model.parameters():
            param.grad = param.detach() * 0.5
        optimizer.step()
    pair.require_same_parameters()
    for _, optimizer, _ in pair.both():
        optimizer.zero_grad()
        optimizer.step()
    pair.require_same_parameters()
    pair.train()


def accumulation(group: Group, update: str) -> None:
    for set_to_none in (True, False):
        for without_exchange in (True, False):
            pair = Pair(group, mlp(), sgd, update)
            for step in range(3):
                for model, _, is_ours in pair.both():
                    for part in range(3):
                        x = rows(group, seed=10 * step + part)
                        silent = is_ours and without_exchange and part < 2
                        with model.no_sync() if silent else contextlib.nullcontext():
                            loss(model, pair.mine(x) if is_ours else x).backward()
                pair.require_same_gradients(f"accumulated {set_to_none} {without_exchange}")
                for _, optimizer, _ in pair.both():
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
                pair.require_same_parameters()


def local_gradients_are_local(group: Group, update: str) -> None:
    pair = Pair(group, mlp(), sgd, update)
    x = pair.mine(rows(group))
    with pair.ours.no_sync(), pair.ours.no_sync():
        loss(pair.ours, x).backward()
    loss(pair.plain, x).backward()
    pair.require_same_gradients("local")
    with pytest.raises(pl.errors.UsageError, match="no_sync"):
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    pair.train()


def several_passes(group: Group, update: str) -> None:
    pair = Pair(group, mlp(), sgd, update)
    for step in range(3):
        x, z = rows(group, seed=step), rows(group, seed=step + 50)
        for model, optimizer, is_ours in pair.both():
            optimizer.zero_grad()
            parts = (pair.mine(x), pair.mine(z)) if is_ours else (x, z)
            first, second = loss(model, parts[0]), loss(model, parts[1])
            with torch.no_grad():
                model(parts[0])
            (first + 2 * second).backward(retain_graph=True)
            (3 * second).backward()
        pair.require_same_gradients("several passes")
        for _, optimizer, _ in pair.both():
            optimizer.step()
        pair.require_same_parameters()


class Checkpointed(nn.Module):
    """Layers under checkpoints; one of them is used twice."""

    def __init__(self, width: int, reentrant: bool, twice: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = (
            nn.Linear(6, width),
            nn.Linear(width, width),
            nn.Linear(width, 2),
        )
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for _ in range(2 if self.twice else 1):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant).tanh()
        return self.last(x)


def checkpoints(group: Group, update: str) -> None:
    # 100 x 100: a gradient that is copied at once; 5 x 5: one that waits for its bucket.
    for width in (5, 100):
        for reentrant in (True, False):
            for twice in (False, True):
                torch.manual_seed(1)
                model = Checkpointed(width, reentrant, twice).double()
                Pair(group, model, sgd, update).train()
    # Around the whole model.
    for reentrant in (True, False):
        pair = Pair(group, mlp(), sgd, update)
        for step in range(2):
            x = rows(group, seed=step)
            for model, optimizer, is_ours in pair.both():
                optimizer.zero_grad()
                part = (pair.mine(x) if is_ours else x).clone().requires_grad_()
                (checkpoint(model, part, use_reentrant=reentrant) ** 2).mean().backward()
            pair.require_same_gradients(f"all under a checkpoint, {reentrant}")
            for _, optimizer, _ in pair.both():
                optimizer.step()
            pair.require_same_parameters()


def uneven_batches(group: Group, update: str) -> None:
    contribution = job.current().contribution
    sizes = [r + 1 for r in range(group.size)]
    if group.size > 1:
        sizes[0] = 0  # a rank whose batch must not count
    starts = [sum(sizes[:r]) for r in range(group.size + 1)]
    contribution.set(sizes[group.rank] * group.size / sum(sizes))  # before it is distributed
    pair = Pair(group, mlp(), sgd, update)
    for step in range(4):
        x = torch.randn(
            sum(sizes), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        mine = x[starts[group.rank] : starts[group.rank + 1]]
        if not len(mine):
            mine = torch.full((1, 6), float("inf"), dtype=torch.float64)
        for model, optimizer, is_ours in pair.both():
            optimizer.zero_grad()
            loss(model, mine if is_ours else x).backward()
        pair.require_same_gradients("uneven")
        for _, optimizer, _ in pair.both():
            optimizer.step()
        pair.require_same_parameters()
    contribution.set(1.0)
    pair.train()


def weights_of_parameters_that_join(group: Group, update: str) -> None:
    """The weight holds for parameters that are thawed while it stays the same."""
    contribution = job.current().contribution
    model = mlp()
    model[0].requires_grad_(False)
    contribution.set(1.0)
    pair = Pair(group, model, sgd, update)
    weight = 2.0 * (group.rank + 1) / (group.size + 1)
    contribution.set(weight)
    for model, _, _ in pair.both():
        model[0].requires_grad_(True)
    x = rows(group)
    for model, _, is_ours in pair.both():
        if is_ours:
            loss(model, pair.mine(x)).backward()
        else:
            for rank, part in enumerate(x.chunk(group.size)):
                (loss(model, part) * 2.0 * (rank + 1) / (group.size + 1) / group.size).backward()
    pair.require_same_gradients("joined")
    contribution.set(1.0)


class Branches(nn.Module):
    """Uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return sum((self.branches[i](x) ** 2).mean() for i in chosen)


def unused_parameters(group: Group, update: str) -> None:
    torch.manual_seed(2)
    pair = Pair(group, Branches().double(), sgd, update)
    x = rows(group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for model, optimizer, is_ours in pair.both():
                optimizer.zero_grad()
                model(pair.mine(x) if is_ours else x, [0, 1]).backward()
            pair.require_same_gradients("unused")
            for _, optimizer, _ in pair.both():
                optimizer.step()
            pair.require_same_parameters()
    assert pair.ours.branches[2].weight.grad is None
    found = [str(w.message) for w in caught]
    assert len(found) == (1 if group.rank == 0 else 0), found
    if found:
        assert "branches.2.weight" in found[0] and "branches.2.bias" in found[0]
        assert "no gradient on any rank" in found[0] and "branches.1" not in found[0]
    if group.size == 1:
        return
    # On the last rank only: counts as zero there.
    last = group.size - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pair.optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()
            pair.ours(pair.mine(x), [0] if group.rank == last else [0, 1]).backward()
            for rank, part in enumerate(x.chunk(group.size)):
                (pair.plain(part, [0] if rank == last else [0, 1]) / group.size).backward()
            pair.require_same_gradients("unused on one rank")
    found = [str(w.message) for w in caught]
    assert len(found) == (1 if group.rank == 0 else 0), found
    if found:
        assert f"none on rank {last} for branches.1.bias" in found[0], found


def refused_unused_parameters(group: Group, update: str) -> None:
    model = Branches().double()
    optimizer = sgd(model.parameters())
    pl.distribute(model, optimizer, update=update, unused="error")
    with pytest.raises(pl.errors.UsageError, match=r"branches\.1\.\w+.*branches\.0\.\w+") as found:
        model(rows(group)[:2], [2]).backward()
    assert "step 1" in str(found.value) and "no gradient on any rank" in str(found.value)
    model = Branches().double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.distribute(model, sgd(model.parameters()), update=update, unused="ignore")
        model(rows(group)[:2], [2]).backward()
    assert model.branches[0].weight.grad is None


def gradients_of_inputs(group: Group, update: str) -> None:
    """torch.autograd.grad through the model, as for a gradient penalty."""
    pair = Pair(group, mlp(), sgd, update)
    for step in range(2):
        x = rows(group, seed=step)
        for model, optimizer, is_ours in pair.both():
            optimizer.zero_grad()
            part = (pair.mine(x) if is_ours else x).clone().requires_grad_()
            out = model(part)
            [slope] = torch.autograd.grad(out.sum(), part, create_graph=True)
            ((out**2).mean() + (slope**2).mean()).backward()
        pair.require_same_gradients("penalty")
        for _, optimizer, _ in pair.both():
            optimizer.step()
        pair.require_same_parameters()


def broken_off(group: Group, update: str) -> None:
    """A backward pass that raises before it sends anything leaves no trace in the next one."""

    def refuse(grad: torch.Tensor) -> None:
        raise ValueError("no")

    for goes_round in (False, True):
        pair = Pair(group, mlp(), sgd, update)
        x = pair.mine(rows(group))
        hook = pair.ours[0].weight.register_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            loss(pair.ours, x).backward()
        hook.remove()
        if goes_round:  # not through the model, so nobody learns of a new beginning
            first, between, last = pair.ours
            pair.optimizer.zero_grad()
            last(between(first(x))).sum().backward()
        with pytest.raises(pl.errors.PacelineError, match="ended with an error"):
            pair.optimizer.step()
        pair.optimizer.zero_grad()
        if not goes_round:
            pair.train()


BATTERY = (
    averages_and_clipping,
    accumulation,
    local_gradients_are_local,
    several_passes,
    checkpoints,
    uneven_batches,
    weights_of_parameters_that_join,
    unused_parameters,
    refused_unused_parameters,
    gradients_of_inputs,
    broken_off,
)


def run_battery(group: Group, update: str) -> None:
    for check in BATTERY:
        print(check.__name__, flush=True)  # shown when it fails
        check(group, update)


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("world_size", "hosts"), [(1, 1), (2, 1), (3, 2)])
def test_gradients_are_those_of_one_process(world_size: int, hosts: int, update: str) -> None:
    run_ranks(world_size, run_battery, update, hosts=hosts, env={"PACELINE_TIMEOUT_S": "50"})
