"""Predictions beside measurements: errors, coverage, rank order, regret; and the fit of constants.

Constants are fitted on the calibration configurations of split.json alone, one after the other on
a grid, by the mean squared logarithm of predicted / measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from paceline.planner.candidates import candidate
from paceline.planner.cluster import Cluster, Host
from paceline.planner.predict import Prediction, predict
from paceline.planner.profile import ModelProfile
from paceline.planner.quantities import Link, Straggler
from paceline.planner.step_costs import ON_MEASURED_LINKS, Constants

_GRIDS = {
    "bucket_s": (0.1e-3, 0.3e-3, 1e-3, 2e-3),
    "step_s": (0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3),
    "server_copies": (0.5, 1.0, 1.5, 3.0, 6.0, 10.0),
    "apply_copies": (2.0, 4.0, 8.0, 12.0),
    "round_copies": (2.0, 4.0, 6.0, 10.0, 16.0),
}
_WIRE_GRID = (0.2e-9, 0.4e-9, 0.6e-9, 0.9e-9, 1.3e-9, 2e-9)


def medians(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with one value for each profile, link and configuration: the median."""

    def middle(found: list[Any], key: Any) -> Any:
        return sorted(found, key=key)[(len(found) - 1) // 2]

    def compute_s(profile: Mapping[str, Any]) -> float:
        return sum(profile[name] for name in ("forward_s", "backward_s", "optimizer_s"))

    return {
        **state,
        "profiles": {at: middle(all_, compute_s) for at, all_ in state["profiles"].items() if all_},
        "links": {
            at: middle(all_, lambda link: link[0]) for at, all_ in state["links"].items() if all_
        },
        "measured": {
            at: {"step_s": statistics.median(one["step_s"] for one in all_)}
            for at, all_ in state["measured"].items()
        },
    }


@dataclass(frozen=True)
class Scored:
    """One configuration."""

    config: Mapping[str, Any]
    measured_s: float
    prediction: Prediction

    @property
    def error(self) -> float:
        return self.prediction.step_s / self.measured_s - 1

    @property
    def is_covered(self) -> bool:
        return self.prediction.low_s <= self.measured_s <= self.prediction.high_s


def predicted(
    config: Mapping[str, Any], state: Mapping[str, Any], constants: Constants, wire: float
) -> Prediction:
    """Predict one configuration from what was measured without it: profile, link, copies."""
    n = config["workers"]
    profile = msgspec.convert(state["profiles"][f"{config['model']} {n}"], ModelProfile)
    rate, latency_s = state["links"][str(config["link_mbit"])]
    hosts = tuple(Host(f"h{at}", state["cores"], 0, 1, machine=0) for at in range(n))
    cluster = Cluster(
        hosts,
        Link(rate, latency_s),
        copy_bytes_per_s=state["copy_bytes_per_s"],
        wire_cpu_s_per_byte=wire,
    )
    slow = config["slow"]
    straggler = Straggler(float(slow.partition(":")[2][:-1]), workers=1) if slow else Straggler()
    one = candidate(config["pace"], n, is_colocated=True)
    return predict(one, profile, cluster, straggler=straggler, constants=constants, copies=n)


def score(
    configs: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
    constants: Constants,
    wire: float,
) -> list[Scored]:
    """Return all configurations that have been measured."""
    return [
        Scored(one, state["measured"][one["id"]]["step_s"], predicted(one, state, constants, wire))
        for one in configs
        if one["id"] in state["measured"]
        and f"{one['model']} {one['workers']}" in state["profiles"]
    ]


def fit(configs: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> tuple[Constants, float]:
    """Return the constants that fit the calibration configurations best, and their error."""
    used = [
        one for one in configs if one["use"] == "calibration" and one["id"] in state["measured"]
    ]
    constants, wire = ON_MEASURED_LINKS, _WIRE_GRID[2]

    def loss(trial: Constants, wire_s: float) -> float:
        errors = [math.log1p(one.error) for one in score(used, state, trial, wire_s)]
        return statistics.fmean(error * error for error in errors)

    for _ in range(4):
        for name, grid in _GRIDS.items():
            tried = [replace(constants, **{name: value}) for value in grid]
            constants = min(tried, key=lambda one: loss(one, wire))
        wire = min(_WIRE_GRID, key=lambda value: loss(constants, value))
    return replace(constants, sigma=max(0.05, math.sqrt(loss(constants, wire)))), wire


def rank_correlation(scored: Sequence[Scored]) -> float:
    """Return Spearman's correlation of predicted and measured steps."""
    if len(scored) < 3:
        return float("nan")
    by_predicted = sorted(scored, key=lambda one: one.prediction.step_s)
    by_measured = sorted(scored, key=lambda one: one.measured_s)
    n = len(scored)
    distance = sum((at - by_measured.index(one)) ** 2 for at, one in enumerate(by_predicted))
    return 1 - 6 * distance / (n * (n * n - 1))


def regrets(scored: Sequence[Scored]) -> list[float]:
    """Return what the fastest predicted pace loses against the best measured, by setting."""
    groups: dict[tuple[Any, ...], list[Scored]] = {}
    for one in scored:
        config = one.config
        key = (config["model"], config["workers"], config["link_mbit"], config["slow"])
        groups.setdefault(key, []).append(one)
    found = []
    for group in groups.values():
        if len(group) > 1:
            chosen = min(group, key=lambda one: one.prediction.step_s)
            found.append(chosen.measured_s / min(one.measured_s for one in group) - 1)
    return found


def report(scored: Sequence[Scored], title: str) -> str:
    """Return one table with its figures."""
    lines = [f"\n{title}", f"{'configuration':58} {'measured':>10} {'predicted':>10} error"]
    for one in scored:
        mark = "" if one.is_covered else "  outside the interval"
        lines.append(
            f"{one.config['id']:58} {one.measured_s * 1e3:8.1f}ms"
            f" {one.prediction.step_s * 1e3:8.1f}ms {one.error:+5.0%}{mark}"
        )
    if scored:
        errors = sorted(abs(one.error) for one in scored)
        covered = sum(one.is_covered for one in scored) / len(scored)
        lines.append(
            f"{len(scored)} configurations: median error {statistics.median(errors):.0%}, worst"
            f" {errors[-1]:.0%}, inside the interval {covered:.0%}"
        )
        models = sorted({one.config["model"] for one in scored})
        ranks = [
            f"{m} {rank_correlation([one for one in scored if one.config['model'] == m]):.2f}"
            for m in models
        ]
        lines.append(f"rank correlation: {', '.join(ranks)}")
    lost = regrets(scored)
    if lost:
        lines.append(
            f"regret: median {statistics.median(lost):.0%}, worst {max(lost):.0%} of {len(lost)}"
        )
    return "\n".join(lines)
