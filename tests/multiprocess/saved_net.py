"""A model as a script has it, and what another process does with a saved one.

Nothing here imports Paceline: the process that loads a model refuses to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """A large linear layer, a batch norm, a tied weight and a hook of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 300)
        self.wide = nn.Linear(300, 300, bias=False)  # a norm takes it off again
        self.norm = nn.BatchNorm1d(300)
        self.head = nn.Linear(300, 2)
        self.twin = nn.Linear(300, 2)
        self.twin.weight = self.head.weight
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.wide(self.body(x).tanh()))
        return self.head(y) + self.twin(y)


SAFE = [Net, nn.Linear, nn.BatchNorm1d, set]


def require_plain(model: nn.Module) -> None:
    """Refuse a model that has anything which a script did not put there."""
    fresh = Net()
    assert model.head.weight is model.twin.weight
    pairs = zip(model.named_modules(), fresh.named_modules(), strict=True)
    for (name, module), (_, plain) in pairs:
        assert vars(module).keys() == vars(plain).keys(), name
        assert not module._forward_hooks and not module._forward_pre_hooks, name
        assert not module._state_dict_pre_hooks, name
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, name
        assert not vars(tensor), name


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


def read(path: str) -> dict[str, Any]:
    """Load what the ranks have saved; the script's own classes are all that is allowed."""
    torch.serialization.add_safe_globals(SAFE)
    model = torch.load(f"{path}.model", weights_only=True)
    require_plain(model)
    both = torch.load(f"{path}.both", weights_only=False)
    require_plain(both["model"])
    return both


def load(path: str) -> None:
    """Go on with a saved model and its optimizer; what it comes to is saved as well."""
    loaded = read(path)
    model, optimizer = loaded["model"], loaded["optimizer"]
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(mine, model.parameters(), strict=True))
    train(model, optimizer, 2)
    torch.save(model.state_dict(), f"{path}.trained")
