"""Scripts (see ways.py) with the optimizers, schedulers and models that there are.

`wide` is large enough to be cut over several servers and to compute gradients in their buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from ways import Result, Script, Way, grads_of, noise, result_of
from workloads import TinyGPT, make_model

STEPS = 5
ROWS = 12  # of all workers together


def wide(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(4)
    return (
        nn.Sequential(nn.Linear(10, 130), nn.Tanh(), nn.Linear(130, 519), nn.Tanh())
        .append(nn.Linear(519, 5))
        .to(dtype)
    )


def loss_of(model: nn.Module, way: Way, step: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x, y = noise(ROWS, 10, seed=step, dtype=dtype), noise(ROWS, 5, seed=100 + step, dtype=dtype)
    return F.mse_loss(model(way.mine(x)), way.mine(y))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)


Act = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def train(
    way: Way,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    before_step: Act | None = None,
    after_step: Act | None = None,
) -> Result:
    """Train in the plainest way, with something done before and after each step."""
    way.distribute(model, optimizer)
    seen: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, way, step)
        loss.backward()
        if before_step is not None:
            seen.append(before_step(model, optimizer, step))
            seen.append(grads_of(model))
        optimizer.step()
        if after_step is not None:
            way.settle(model)
            seen.append(after_step(model, optimizer, step))
        seen.append(loss.item())
    return result_of(model, optimizer, seen=seen)


# -- optimizers -----------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain sgd": ("SGD", {"lr": 0.05}),
    "nesterov": ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "adam one by one": ("Adam", {"lr": 1e-3, "amsgrad": True, "foreach": False}),
    "adam foreach": ("Adam", {"lr": 1e-3, "foreach": True}),
    "adamw": ("AdamW", {"lr": 1e-3}),
    "adagrad": ("Adagrad", {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "adadelta": ("Adadelta", {"lr": 0.5}),
    "adamax": ("Adamax", {"lr": 1e-3}),
    # On a device torch would choose foreach, which rounds these differently than servers do.
    "nadam": ("NAdam", {"lr": 1e-3, "foreach": False}),
    "radam": ("RAdam", {"lr": 1e-3, "foreach": False}),
    "asgd": ("ASGD", {"lr": 1e-3, "foreach": False}),
    "rprop": ("Rprop", {"lr": 1e-3}),
    "adafactor": ("Adafactor", {"lr": 1e-2}),
    "fused sgd": ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "fused adam": ("Adam", {"lr": 1e-3, "fused": True}),
    "fused adamw": ("AdamW", {"lr": 1e-3, "amsgrad": True, "fused": True}),
    "fused adagrad": ("Adagrad", {"lr": 1e-2, "fused": True}),
}


def with_optimizer(name: str) -> Script:
    def script(way: Way) -> Result:
        kind, settings = SETTINGS[name]
        model = wide()
        return train(way, model, getattr(torch.optim, kind)(model.parameters(), **settings))

    return script


def muon(way: Way) -> Result:
    """It needs whole matrices; small ones, because it computes in bfloat16."""
    torch.manual_seed(4)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((10, 9), (9, 7), (7, 5))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01, momentum=0.9)
    return train(way, model, optimizer)


def several_groups(way: Way) -> Result:
    """Rates and decays by group; the script changes one of them itself."""
    model = wide()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": biases, "weight_decay": 0.0, "momentum": 0.5},
        {"params": weights[1:], "lr": 0.05},
        {"params": weights[:1], "nesterov": True},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.05)

    def slower(_model: nn.Module, optimizer: torch.optim.Optimizer, _step: int) -> None:
        optimizer.param_groups[1]["lr"] *= 0.5

    return train(way, model, optimizer, after_step=slower)


def with_scheduler(way: Way, make: Callable[..., Any], scheduler_first: bool) -> Result:
    """Train with a rate that changes once per step, however many workers there are."""
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = make(optimizer) if scheduler_first else None
    way.distribute(model, optimizer)
    scheduler = scheduler or make(optimizer)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, way, step).backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return result_of(model, optimizer, rates=rates)


def step_lr(way: Way) -> Result:
    found = with_scheduler(
        way, lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1), scheduler_first=True
    )
    rates = [found[f"/rates/{step}"] for step in range(STEPS)]
    assert [round(rate, 9) for rate in rates] == [1e-2, 1e-2, 1e-3, 1e-3, 1e-4]
    return found


def one_cycle(way: Way) -> Result:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)

    return with_scheduler(way, make, scheduler_first=False)


# -- models ---------------------------------------------------------------------------------------


def tied_weights(way: Way) -> Result:
    torch.manual_seed(6)
    model = TinyGPT(width=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    way.distribute(model, optimizer)
    for step in range(STEPS):
        text = torch.randint(23, (ROWS, 9), generator=torch.Generator().manual_seed(step))
        text = way.mine(text)
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    return result_of(model, optimizer)


def batch_norm(way: Way) -> Result:
    return _train_on_images(way, make_model("resnet"))


def channels_last(way: Way) -> Result:
    return _train_on_images(way, make_model("resnet").to(memory_format=torch.channels_last))


def _train_on_images(way: Way, model: nn.Module) -> Result:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    way.distribute(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(way.mine(noise(ROWS, 3, 8, 8, seed=step))).square().mean().backward()
        optimizer.step()
    return result_of(model, optimizer)


def float64(way: Way) -> Result:
    model = wide(torch.float64)
    return train(way, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def two_dtypes(way: Way) -> Result:
    model = wide()
    model[2].double()
    model[1], model[3] = nn.Sequential(nn.Tanh(), ToDouble()), nn.Sequential(nn.Tanh(), ToFloat())
    return train(way, model, momentum(model))


class ToDouble(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


class ToFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()
