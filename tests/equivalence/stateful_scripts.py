"""Scripts (see ways.py) that reach into parameters, optimizer state and data between steps."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from scripts import STEPS, loss_of, momentum, train, wide
from torch import nn
from ways import Result, Way, grads_of, noise, result_of

import paceline as pl

# -- parameters -----------------------------------------------------------------------------------


def clamped_parameters(way: Way) -> Result:
    """Parameters are kept in bounds, sometimes behind autograd's back."""

    def clamp(model: nn.Module, _optimizer: Any, step: int) -> None:
        for param in list(model.parameters())[step % 2 :: 3]:
            if step % 2:
                param.data.clamp_(-0.05, 0.05)
            else:
                with torch.no_grad():
                    param.clamp_(-0.05, 0.05)

    model = wide()
    return train(way, model, momentum(model), after_step=clamp)


def moved_parameters(way: Way) -> Result:
    def move(model: nn.Module, _optimizer: Any, step: int) -> None:
        params = list(model.parameters())
        params[step % 4].data = params[step % 4].data * 0.5

    model = wide()
    return train(way, model, momentum(model), after_step=move)


def decayed_before_the_step(way: Way) -> Result:
    def decay(model: nn.Module, _optimizer: Any, _step: int) -> None:
        for param in model.parameters():
            param.data.mul_(0.9)

    model = wide()
    return train(way, model, momentum(model), before_step=decay)


def loaded_model(way: Way) -> Result:
    """A checkpoint of the model is loaded once it is distributed, and again later."""
    model, saved = wide(), wide()
    for param in saved.parameters():
        param.data.mul_(0.7)
    optimizer = momentum(model)
    way.distribute(model, optimizer)
    model.load_state_dict(saved.state_dict())
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model, way, step).backward()
        optimizer.step()
        if step == STEPS:
            way.settle(model)
            model.load_state_dict(saved.state_dict())
            with torch.no_grad():
                model(noise(2, 10, seed=1))
    return result_of(model, optimizer)


def frozen_and_thawed(way: Way) -> Result:
    """Layers join and leave while training goes on, one with a state that was loaded before."""
    model = wide()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    optimizer.state[model[4].bias] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full_like(model[4].bias, 0.1),
        "exp_avg_sq": torch.full_like(model[4].bias, 0.2),
    }
    way.distribute(model, optimizer)
    seen = []
    for step in range(3 * STEPS):
        if step == 3:
            seen.append(copy.deepcopy(optimizer.state_dict()))
            model[0].requires_grad_(True)
        if step == 6:
            model[2].weight.requires_grad_(False)
            model[4].bias.requires_grad_(True)
        if step == 10:
            model[2].weight.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, way, step).backward()
        seen.append(grads_of(model))
        optimizer.step()
    return result_of(model, optimizer, seen=seen)


# -- the optimizer's state ------------------------------------------------------------------------


def resumed(way: Way) -> Result:
    """The optimizer has a state when it is distributed; it is saved, moved on, and loaded."""
    model = wide()
    optimizer = torch.optim.AdamW(
        [{"params": [p]} for p in model.parameters()], lr=0.01, weight_decay=0.1
    )
    for step in range(2):  # as one process alone would
        optimizer.zero_grad()
        F.mse_loss(model(noise(6, 10, seed=step)), noise(6, 5, seed=step)).backward()
        optimizer.step()
    way.distribute(model, optimizer)
    fresh = copy.deepcopy(optimizer.state_dict())
    seen: list[Any] = [fresh]
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model, way, step).backward()
        optimizer.step()
        if step == 3:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
        if step == 6:
            file.seek(0)
            optimizer.load_state_dict(torch.load(file))
            seen.append(copy.deepcopy(optimizer.state_dict()))
        if step == 8:
            fresh["param_groups"][1]["lr"] = 0.1
            optimizer.load_state_dict(copy.deepcopy(fresh))
    return result_of(model, optimizer, seen=seen)


def forgotten_state(way: Way) -> Result:
    """An empty state is loaded: the optimizer begins anew."""
    model = wide()
    optimizer = momentum(model)
    empty = copy.deepcopy(optimizer.state_dict())
    way.distribute(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, way, step).backward()
        optimizer.step()
        if step == 2:
            optimizer.load_state_dict(empty)
            assert not optimizer.state_dict()["state"]
    return result_of(model, optimizer)


def state_on_one_rank(way: Way) -> Result:
    """Each rank asks for the state once, while the others go on."""
    model = wide()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    way.distribute(model, optimizer)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, way, step).backward()
        optimizer.step()
        if way.group.rank == step:
            seen.append(copy.deepcopy(optimizer.state_dict()))
    return result_of(model, optimizer, seen=seen)


# -- data -----------------------------------------------------------------------------------------


def uneven_batches(way: Way) -> Result:
    """The last batch of an epoch is smaller, and not the same for all workers."""
    inputs, targets = noise(31, 10, seed=1), noise(31, 5, seed=2)
    data = torch.utils.data.TensorDataset(inputs, targets)
    batches = pl.shard(torch.utils.data.DataLoader(data, batch_size=4))
    model = wide()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    way.distribute(model, optimizer)
    sizes = []
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    return result_of(model, optimizer, sizes=sizes)


def averaged_buffers(way: Way) -> Result:
    """Buffers are averaged over the workers, statistics are those of all batches."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    optimizer = momentum(model)
    way.distribute(model, optimizer, buffers="average", batchnorm="global")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, way, step).backward()
        optimizer.step()
    return result_of(model, optimizer)
