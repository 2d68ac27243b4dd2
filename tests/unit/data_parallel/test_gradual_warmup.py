"""Learning rates that grow to the scaled one, alone and with torch's other schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

import paceline as pl
from paceline.errors import UsageError


def make(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_of(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    """Return the rate of the first group in each of so many steps."""
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def test_linear() -> None:
    optimizer = make(0.1, 0.02)
    warmup = pl.GradualWarmup(optimizer, 3, workers=4)
    assert rates_of(optimizer, warmup, 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.08])


def test_the_square_root() -> None:
    optimizer = make(0.1)
    warmup = pl.GradualWarmup(optimizer, 2, rule="sqrt", workers=9)
    assert rates_of(optimizer, warmup, 4) == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(("steps", "workers", "rate"), [(0, 8, 0.8), (5, 1, 0.1), (0, 1, 0.1)])
def test_nothing_to_grow(steps: int, workers: int, rate: float) -> None:
    optimizer = make(0.1)
    warmup = pl.GradualWarmup(optimizer, steps, workers=workers)
    assert rates_of(optimizer, warmup, 8) == pytest.approx([rate] * 8)


def test_alone_there_is_nothing_to_scale() -> None:
    optimizer = make(0.1)
    with pytest.raises(UsageError, match="init"):
        pl.GradualWarmup(optimizer, 3)
    pl.init()
    try:
        assert rates_of(optimizer, pl.GradualWarmup(optimizer, 3), 5) == pytest.approx([0.1] * 5)
    finally:
        pl.shutdown()


def test_a_rate_that_is_a_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    warmup = pl.GradualWarmup(optimizer, 2, workers=3)
    assert rates_of(optimizer, warmup, 4) == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_cosine_goes_from_the_scaled_rate() -> None:
    optimizer = make(0.1)
    parts = [pl.GradualWarmup(optimizer, 4, workers=4), CosineAnnealingLR(optimizer, T_max=10)]
    both = SequentialLR(optimizer, parts, milestones=[4])
    cosine = [0.2 * (1 + math.cos(math.pi * t / 10)) for t in range(10)]
    expected = [0.1, 0.175, 0.25, 0.325, *cosine]
    assert rates_of(optimizer, both, 14) == pytest.approx(expected)


def test_a_chain() -> None:
    optimizer = make(0.1)
    parts = [pl.GradualWarmup(optimizer, 4, workers=5), StepLR(optimizer, step_size=3, gamma=0.5)]
    expected = [0.1, 0.2, 0.3, 0.2, 0.25, 0.25, 0.125]
    assert rates_of(optimizer, ChainedScheduler(parts), 7) == pytest.approx(expected)


@pytest.mark.parametrize("steps_before", [0, 2, 5])
def test_state_survives(steps_before: int) -> None:
    whole = make(0.1)
    expected = rates_of(whole, pl.GradualWarmup(whole, 4, workers=4), 9)
    first = make(0.1)
    warmup = pl.GradualWarmup(first, 4, workers=4)
    rates_of(first, warmup, steps_before)
    second = make(0.1)
    again = pl.GradualWarmup(second, 4, workers=4)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(warmup.state_dict())
    assert rates_of(second, again, 9 - steps_before) == expected[steps_before:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 2.5}, "warmup_steps=2.5"),
        ({"warmup_steps": 2, "rule": "cubic"}, "'linear' or 'sqrt'"),
        ({"warmup_steps": 2, "workers": 0}, "workers=0"),
    ],
)
def test_what_means_nothing_is_refused(arguments: dict[str, object], words: str) -> None:
    optimizer = make(0.1)
    with pytest.raises(UsageError, match=words):
        pl.GradualWarmup(optimizer, **arguments)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.1
