"""Comparisons of a distributed model with one process that has the batches of all workers.

Every rank knows all batches, so it trains the plain model itself and compares. In float64 the two
differ only in the last bits, because sums are taken in another order: TOLERANCE is far above that
and far below any mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group

TOLERANCE = 1e-10
UPDATES = ("replicated", "sharded")

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


class Pair:
    """A plain model and its distributed twin, each with an optimizer; they start equal."""

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        make: Make = sgd,
        update: str = "sharded",
        **options: Any,
    ) -> None:
        self.group = group
        self.plain, self.ours = model, copy.deepcopy(model)
        self.plain_optimizer = make(self.plain.parameters())
        self.optimizer = make(self.ours.parameters())
        found = pl.distribute(self.ours, self.optimizer, update=update, **options)
        assert found[0] is self.ours and found[1] is self.optimizer

    def both(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, bool]]:
        yield self.plain, self.plain_optimizer, False
        yield self.ours, self.optimizer, True

    def mine(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch."""
        return batch.chunk(self.group.size)[self.group.rank]

    def require_same_gradients(self, what: str = "") -> None:
        theirs = dict(self.plain.named_parameters())
        for name, param in self.ours.named_parameters():
            require_close(param.grad, theirs[name].grad, f"{what} gradient of {name}")

    def require_same_parameters(self, what: str = "") -> None:
        theirs = self.plain.state_dict()
        for name, value in self.ours.state_dict().items():
            require_close(value, theirs[name], f"{what} {name}")
        pl.check_consistency(self.ours, self.optimizer)

    def train(self, steps: int = 3, size: int = 6, seed: int = 0) -> None:
        """Train both in the plainest way, comparing all along."""
        for step in range(steps):
            x = rows(self.group, size, seed=100 * seed + step)
            for model, optimizer, is_ours in self.both():
                optimizer.zero_grad()
                loss(model, self.mine(x) if is_ours else x).backward()
            self.require_same_gradients()
            for _, optimizer, _ in self.both():
                optimizer.step()
            self.require_same_parameters()


def rows(group: Group, size: int = 6, *, seed: int = 0) -> torch.Tensor:
    """Return a batch for all workers together: 2 rows for each."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2 * group.size, size, generator=random, dtype=torch.float64)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def require_close(found: Any, expected: Any, what: str) -> None:
    if expected is None:
        assert found is None, f"{what}: expected None"
        return
    assert found is not None, f"{what}: is None"
    if expected.is_sparse:
        assert found.is_sparse, what
        found, expected = found.to_dense(), expected.to_dense()
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}"
    )
