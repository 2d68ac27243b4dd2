"""When a loss is said to rise, and what is said about one update."""

from __future__ import annotations

import math
import random

import pytest

from paceline.data_parallel.checks.free_running import WINDOW, LossWatch, update_notice
from paceline.ps.spec import Rule

ASYNC = Rule(bound=None)


def said(losses: list[float], name: str = "loss") -> list[str]:
    found: list[str] = []
    watch = LossWatch(found.append, "try this")
    for loss in losses:
        watch({name: loss, "accuracy": math.nan})
    return found


def noisy(values: list[float]) -> list[float]:
    draws = random.Random(0)
    return [value * draws.uniform(0.5, 1.5) for value in values]


def test_a_loss_that_rises_for_long_is_said_once() -> None:
    losses = noisy([2.0 * 1.01**step for step in range(500)])
    [line] = said(losses)
    assert line.startswith("the reported loss has risen from 2") and line.endswith(": try this")
    assert said(losses[: 3 * WINDOW]) == []  # not at once


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_said_at_once(value: float) -> None:
    assert said([2.0, value, value]) == [f"the reported loss is not finite ({value}): try this"]


@pytest.mark.parametrize(
    "losses",
    [
        [2.0] * 1000,
        [2.0 / (1 + step) for step in range(1000)],
        [2.0 if step % 300 else 50.0 for step in range(1000)],  # now and then a bad batch
        [-2.0 - 0.01 * step for step in range(1000)],
        [0.0] * 1000,
    ],
    ids=["flat", "falling", "outliers", "negative", "zero"],
)
def test_other_losses_are_not(losses: list[float]) -> None:
    assert said(noisy(losses)) == []


def test_other_values_are_not_losses() -> None:
    assert said([float(step) for step in range(500)], name="step_size") == []


@pytest.mark.parametrize(
    ("rule", "workers", "words"),
    [
        (ASYNC, 4, "gradient of one worker instead of the mean of 4, about 3 updates of others"),
        (Rule(bound=None, push="delta"), 2, "the step of one worker instead of the mean of 2"),
        (Rule(bound=None, softsync=2), 4, "the mean of 2 gradients instead of the mean of 4"),
        (Rule(bound=3, lr="staleness"), 2, "of it is a beginning) or async[softsync=1]"),
    ],
)
def test_what_an_update_is(rule: Rule, workers: int, words: str) -> None:
    assert words in update_notice(rule, workers, [])


@pytest.mark.parametrize("rule", [Rule(bound=0, aggregate=True), Rule(bound=None, softsync=1)])
def test_means_of_all_are_as_in_lockstep(rule: Rule) -> None:
    assert update_notice(rule, 4, []) == ""
    assert update_notice(ASYNC, 1, []) == ""


def test_what_momentum_does() -> None:
    assert "momentum 0.9 applies each 10 times over" in update_notice(ASYNC, 2, [{"momentum": 0.9}])
    assert "for some 10 updates" in update_notice(ASYNC, 2, [{"betas": (0.9, 0.99)}])
    assert "momentum" not in update_notice(ASYNC, 2, [{"momentum": 0.0, "lr": 0.1}])
