"""Scripts (see ways.py) that do something with gradients between backward and step, or no step."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from scripts import ROWS, STEPS, loss_of, momentum, train, wide
from torch import nn
from ways import Result, Way, grads_of, noise, result_of


def clip_norm(way: Way) -> Result:
    def clip(model: nn.Module, _optimizer: Any, _step: int) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        return norm

    model = wide()
    return train(way, model, momentum(model), before_step=clip)


def clip_value(way: Way) -> Result:
    def clip(model: nn.Module, _optimizer: Any, _step: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    model = wide()
    return train(way, model, momentum(model), before_step=clip)


def clip_behind_autograd(way: Way) -> Result:
    """Changes that no version counter sees, of some gradients in some steps."""

    def clip(model: nn.Module, _optimizer: Any, step: int) -> None:
        for param in list(model.parameters())[step % 3 :]:
            param.grad.data.clamp_(-1e-3, 1e-3)

    model = wide()
    return train(way, model, momentum(model), before_step=clip)


def replace_gradients(way: Way) -> Result:
    """Other tensors as gradients, and none."""

    def replace(model: nn.Module, _optimizer: Any, step: int) -> None:
        params = list(model.parameters())
        params[0].grad = None if step % 2 else params[0].grad
        params[2].grad = params[2].grad * 0.5
        params[3].grad = torch.ones_like(params[3]) * step

    model = wide()
    return train(way, model, momentum(model), before_step=replace)


def accumulation(way: Way) -> Result:
    model = wide()
    optimizer = momentum(model)
    way.distribute(model, optimizer)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(2):
                (loss_of(model, way, 10 * step + part) / 3).backward()
        (loss_of(model, way, 10 * step + 2) / 3).backward()
        seen.append(grads_of(model))
        optimizer.step()
    return result_of(model, optimizer, seen=seen)


def zeros_stay(way: Way) -> Result:
    """Gradients are zeroed in place, in two ways, and kept over a step."""
    model = wide()
    optimizer = momentum(model)
    way.distribute(model, optimizer)
    seen = []
    for step in range(2 * STEPS):
        if step % 3 == 0:
            optimizer.zero_grad(set_to_none=False)
        elif step % 3 == 1:
            for param in model.parameters():
                param.grad.data.zero_()
        loss_of(model, way, step).backward()  # else they add up
        seen.append(grads_of(model))
        optimizer.step()
    return result_of(model, optimizer, seen=seen)


def left_out_steps(way: Way) -> Result:
    """Some steps are not taken, after the gradients were changed."""
    model = wide()
    optimizer = momentum(model)
    way.distribute(model, optimizer)
    seen = []
    for step in range(2 * STEPS):
        if step % 4 != 2:  # there the gradients of two batches add up
            optimizer.zero_grad()
        loss_of(model, way, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen += [norm, grads_of(model)]
        if step % 3 != 1:
            optimizer.step()
    return result_of(model, optimizer, seen=seen)


def grad_scaler(way: Way) -> Result:
    """A GradScaler unscales gradients in place, and leaves out steps with infinite ones."""
    model = wide()
    optimizer = momentum(model)
    way.distribute(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, way, step)
        if step in (2, 5) and way.group.rank == way.group.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[2] == scales[1] / 2
    return result_of(model, optimizer, scales=scales)


class Branches(nn.Module):
    """Uses one of its layers, or another; one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(10, 90) for _ in range(4))
        self.head = nn.Linear(90, 5)

    def forward(self, x: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        return self.head(sum(self.layers[number](x) for number in which))


def unused_parameters(way: Way) -> Result:
    """Layers that some workers or all of them do not use: no gradient, no state, no decay."""
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    way.distribute(model, optimizer, unused="ignore")
    seen = []
    for step, first in zip(range(STEPS), itertools.cycle((0, 0, 1)), strict=False):
        optimizer.zero_grad()
        x = way.mine(noise(ROWS, 10, seed=step))
        which = [first, 2] if way.group.rank == step % way.group.size else [first]
        model(x, which).square().mean().backward()
        seen.append(grads_of(model))
        optimizer.step()
        if step == 0:
            seen.append(copy.deepcopy(optimizer.state_dict()))  # nothing of what was not used
    found = result_of(model, optimizer, seen=seen)
    assert not any(name.startswith("/optimizer/state/6/") for name in found)
    return found


def gradients_used_twice(way: Way) -> Result:
    """Two steps with one gradient, and one with none."""
    model = wide()
    optimizer = momentum(model)
    way.distribute(model, optimizer)
    for step in range(STEPS):
        loss_of(model, way, step).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    return result_of(model, optimizer)
