"""Measuring layers: numbers that can be counted are right, and the model is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import UsageError
from support.stage_models import Shared, TiedGPT


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def test_bytes_are_counted():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))
    costs = pl.measure_layers(model, torch.randn(3, 4))
    assert [one.name for one in costs] == ["0", "1", "2"]
    assert [one.parameter_bytes for one in costs] == [4 * (32 + 8), 0, 4 * 16]
    assert [one.output_bytes for one in costs] == [4 * 24, 4 * 24, 4 * 6]
    # A linear layer keeps its input, tanh what it returned.
    assert [one.activation_bytes for one in costs] == [4 * 12, 4 * 24, 4 * 24]
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in costs)


def test_tied_parameters_count_once_and_repeated_layers_sum_up():
    costs = {one.name: one for one in pl.measure_layers(TiedGPT(), torch.randint(10, (2, 5)))}
    model = TiedGPT()
    whole = sum(4 * param.numel() for param in model.parameters())
    assert sum(one.parameter_bytes for one in costs.values()) == whole
    shared = {one.name: one for one in pl.measure_layers(Shared(), torch.randn(2, 3, 8))}
    assert [one.calls for one in shared.values()] == [1, 3, 1]
    # The call under no_grad keeps nothing, each of the two others what the first layer keeps.
    assert shared["same"].activation_bytes >= 2 * shared["first"].activation_bytes


def test_the_model_is_as_before():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.ReLU(inplace=True)
    )
    model[1].eval()  # frozen
    model[0].weight.grad = torch.ones_like(model[0].weight)
    grad, state = model[0].weight.grad, torch.get_rng_state()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    example = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    copy = example.clone()
    pl.measure_layers(model, example, repeats=1)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(example, copy)
    assert model[0].weight.grad is grad and torch.equal(grad, torch.ones_like(grad))
    assert all(param.grad is None for name, param in model.named_parameters() if name != "0.weight")
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.training and not model[1].training


def test_a_model_without_data_is_refused():
    with pytest.raises(UsageError, match="meta device"):
        pl.measure_layers(nn.Linear(2, 2, device="meta"), torch.randn(1, 2))
    with pytest.raises(UsageError, match="repeats=0"):
        pl.measure_layers(nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2), repeats=0)
