"""Notices about a free-running pace: what one update is, and a warning when the loss rises.

At `async` and `ssp` each gradient is applied by itself and late, so that a learning rate at which
`allreduce` trains well may be too high. One worker logs that at the start, and warns once if the
loss that the script reports shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.ps.spec import Rule

WINDOW = 20  # reports whose mean is compared
WINDOWS_ABOVE = 3  # in a row, before the warning
MARGIN = 0.2  # of the first window's mean: constant losses vary too


def remedies(rule: Rule, workers: int) -> str:
    """Return what helps against updates that are too large or too late, as options."""
    found = [f"a lower learning rate (1/{workers} of it is a beginning)"]
    if rule.lr == "plain":
        found.append("lr=staleness")
    if not rule.softsync:
        found.append("softsync=1" if rule.bound is None else "async[softsync=1]")
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


def update_notice(rule: Rule, workers: int, groups: Iterable[Mapping[str, Any]]) -> str:
    """Return what one update is, with an optimizer of these groups; "" if it is as in lockstep."""
    pooled = max(1, workers // rule.softsync) if rule.softsync else 1
    if rule.aggregate or workers < 2 or pooled >= workers:
        return ""
    sent = "gradient" if rule.push == "grad" else "step"
    what = f"the {sent} of one worker" if pooled == 1 else f"the mean of {pooled} {sent}s"
    late = workers // pooled - 1
    updates = "1 update" if late == 1 else f"{late} updates"
    return (
        f"one update is {what} instead of the mean of {workers}, about {updates} of others late"
        f"{_about_momentum(groups)}. If the loss rises: {remedies(rule, workers)}"
    )


def _about_momentum(groups: Iterable[Mapping[str, Any]]) -> str:
    plain = beta = 0.0
    for group in groups:
        plain = max(plain, float(group.get("momentum", 0.0)))
        beta = max(beta, float(group.get("betas", (0.0,))[0]))
    if plain and plain < 1:
        return f"; momentum {plain:g} applies each {1 / (1 - plain):.3g} times over in all"
    return f"; its betas keep each in use for some {1 / (1 - beta):.3g} updates" if beta else ""


class LossWatch:
    """Watches the losses that the script reports; warns once if one rises or is not finite."""

    def __init__(self, warn: Callable[[str], None], advice: str) -> None:
        self._warn: Callable[[str], None] | None = warn
        self._advice = advice
        self._seen: dict[str, list[float]] = {}  # by name: the window that fills
        self._first: dict[str, float] = {}  # by name: the mean of the first window
        self._above: dict[str, int] = {}

    def __call__(self, values: Mapping[str, float]) -> None:
        """Process reported values; only losses matter."""
        for name, value in values.items():
            if self._warn is not None and (name == "loss" or name == "train_loss"):
                self._look(name, value)

    def _look(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            self._warn_once(f"the reported {name} is not finite ({value})")
            return
        window = self._seen.setdefault(name, [])
        window.append(value)
        if len(window) < WINDOW:
            return
        mean = math.fsum(window) / WINDOW
        window.clear()
        first = self._first.setdefault(name, mean)
        is_above = mean > first + MARGIN * abs(first)
        self._above[name] = self._above.get(name, 0) + 1 if is_above else 0
        if self._above[name] >= WINDOWS_ABOVE:
            self._warn_once(f"the reported {name} has risen from {first:.4g} to {mean:.4g}")

    def _warn_once(self, what: str) -> None:
        assert self._warn is not None
        self._warn(f"{what}: {self._advice}")
        self._warn = None
