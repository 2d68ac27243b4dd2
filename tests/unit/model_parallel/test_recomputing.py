"""Recomputed blocks: the same gradients and names, with less kept between the passes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.fsdp.blocks import recompute


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))

    def forward(self, x, scale=1.0):
        return x + scale * self.inner(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def saved_elements(model, x):
    """Count what autograd keeps of a forward pass, without the parameters."""
    params, kept = {p.data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        if tensor.data_ptr() not in params:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).sum()
    return loss, sum(kept.values())


def test_gradients_and_names_are_the_same_and_less_is_kept():
    torch.manual_seed(0)
    plain = Model()
    again = copy.deepcopy(plain)
    assert recompute(again) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(again.state_dict()) == list(plain.state_dict())
    x, kept = torch.randn(16, 8), []
    for model in (plain, again):
        torch.manual_seed(1)  # for the dropout
        loss, num = saved_elements(model, x)
        kept.append(num)
        torch.rand(3)  # what happens in between does not matter
        loss.backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert kept[1] < kept[0] / 4
    with torch.no_grad():
        assert torch.equal(again.eval()(x), plain.eval()(x))


def test_of_a_body_its_blocks_are_recomputed():
    model = nn.Sequential(nn.Linear(8, 8), Model(), nn.Linear(8, 8))
    assert recompute(model) == ["0", "1.blocks.0", "1.blocks.1", "1.blocks.2", "2"]


def test_a_copy_recomputes_with_its_own_parameters():
    model = Model()
    recompute(model)
    other = copy.deepcopy(model)
    other(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(UsageError, match=r"Linear has no blocks .*nn.ModuleList"):
        recompute(nn.Linear(2, 2))
