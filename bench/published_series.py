"""Published measurements of other systems, predicted with the planner's formulas.

    python bench/published_series.py

The first value of each series (bench/published/series.json, with sources) calibrates what we cannot
know, such as the kernels of other hardware. The rest is predicted. A value that our families cannot
predict from one row counts as a miss, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.planner import formulas
from paceline.planner.step_costs import DEFAULT_CONSTANTS

SERIES = Path(__file__).parent / "published" / "series.json"
WITHIN = 0.20
_SHARE = DEFAULT_CONSTANTS.link_share

Series = dict[str, Any]


def servers(one: Series) -> list[float]:
    """Synchronous servers: the first row gives a worker's own rate, the links the rest."""
    given = one["known"]
    model, count = given["model_bytes"], given["servers"]
    worker = model / one["values"][0]
    server = one["assumed"]["server_bytes_per_s"] * _SHARE
    return [
        formulas.ps_s(model, n, count, worker_bytes_per_s=worker, server_bytes_per_s=server)
        for n in one["at"][1:]
    ]


def asynchronous(one: Series) -> list[float]:
    """Workers that do not wait are faster by what the slowest of them takes longer."""
    return [
        one["values"][0] * formulas.slowest_of(1.0, one["assumed"]["cv"], one["known"]["workers"])
    ]


def colocated(one: Series) -> list[float]:
    """Servers beside workers: links carry 2 (h-1)/h M each way while backward computes."""
    given, assumed = one["known"], one["assumed"]
    compute_s = given["batch"] / one["values"][0]
    found = []
    for n in one["at"][1:]:
        hosts = max(1, n // given["per_host"])
        rate = assumed["link_bytes_per_s"] * _SHARE
        moving_s = formulas.ring_s(given["model_bytes"], hosts, rate, 0.0)
        slow_s = formulas.slowest_of(compute_s, assumed["cv"], n)
        # Backward is two thirds; the last bucket of many cannot be hidden.
        step_s = max(slow_s, slow_s / 3 + moving_s) + moving_s / 10
        found.append(n * given["batch"] / step_s)
    return found


def _gamma(compute_s: float, network_s: float, step_s: float) -> float:
    """Return AdaptDL's gamma that gives this step."""
    low, high = 1.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        is_long = formulas.overlapped_s(compute_s, network_s, middle) > step_s
        low, high = (middle, high) if is_long else (low, middle)
    return low


def overlap(one: Series) -> list[float]:
    """A ring whose overlap is calibrated on the first model and used for the others."""
    given, compute = one["known"], one["assumed"]["compute_s"]
    rate = given["link_bytes_per_s"] * _SHARE
    network = [formulas.ring_s(m, given["hosts"], rate, 0.0) for m in given["model_bytes"]]
    gamma = _gamma(compute[0], network[0], compute[0] / one["values"][0])
    pairs = list(zip(compute, network, strict=True))[1:]
    return [c / formulas.overlapped_s(c, t, gamma) for c, t in pairs]


def spare_hosts(one: Series) -> list[float]:
    """As many spare hosts as workers, compared with a ring; the first ratio gives the overlap."""
    given, assumed = one["known"], one["assumed"]
    hosts, rate = assumed["hosts"], given["link_bytes_per_s"] * _SHARE
    ring = [formulas.ring_s(m, hosts, rate, 0.0) for m in given["model_bytes"]]
    best = [formulas.byteps_s(m, hosts, hosts, rate) for m in given["model_bytes"]]

    def ratio(at: int, gamma: float) -> float:
        compute_s = assumed["compute_s"][at]
        slow_s = formulas.overlapped_s(compute_s, ring[at], gamma)
        return slow_s / formulas.overlapped_s(compute_s, best[at], gamma)

    gammas = [1 + step / 10 for step in range(91)]
    gamma = min(gammas, key=lambda g: abs(ratio(0, g) - one["values"][0]))
    return [ratio(1, gamma)]


def pipeline(one: Series) -> list[float]:
    """Strong scaling: with more replicas a pipeline has fewer microbatches and more bubbles."""
    assumed, batch = one["assumed"], one["known"]["batch"]
    stages, width = assumed["stages"], assumed["stages"] * assumed["tensor"]

    def slots(gpus: int) -> float:
        microbatches = batch / (gpus / width)
        share = formulas.bubble_share(stages, microbatches * assumed["interleaved"])
        return microbatches / (1 - share)

    first = slots(one["at"][0])
    return [one["values"][0] * slots(gpus) / first for gpus in one["at"][1:]]


def sharded(one: Series) -> list[float]:
    """Gathers that are hidden: what remains is the slowest of more processes."""
    cv, at = one["assumed"]["cv"], one["at"]
    first = formulas.slowest_of(1.0, cv, at[0])
    return [one["values"][0] * first / formulas.slowest_of(1.0, cv, n) for n in at[1:]]


FAMILIES: dict[str, Callable[[Series], list[float]]] = {
    "servers": servers,
    "asynchronous": asynchronous,
    "colocated": colocated,
    "overlap": overlap,
    "spare-hosts": spare_hosts,
    "pipeline": pipeline,
    "sharded": sharded,
}


def rows() -> list[tuple[int, str, str, float | None, float | None]]:
    """Return row, name and place, measured, predicted of every value but the first ones."""
    found = []
    for one in json.loads(SERIES.read_text(encoding="utf-8"))["series"]:
        measured = one["values"][1:]
        family = FAMILIES.get(one["family"])
        predicted = family(one) if family else [None] * len(measured)
        for at, m, p in zip(one["at"][1:], measured, predicted, strict=True):
            found.append((one["row"], one["name"], str(at), m, p))
    return found


def main() -> None:
    """Print the table and the share of rows within 20 %."""
    good, every = 0, rows()
    print(f"{'row':>3}  {'series':72} {'at':>12} {'measured':>9} {'predicted':>9}  error")
    for row, name, at, measured, predicted in every:
        line = f"{row:3}  {name[:72]:72} {at:>12} {measured if measured else '?':>9}"
        if predicted is None or measured is None:
            print(f"{line} {'-':>9}  not predicted")
            continue
        error = predicted / measured - 1
        good += abs(error) <= WITHIN
        print(f"{line} {predicted:9.4g}  {error:+.0%}{'' if abs(error) <= WITHIN else '  MISS'}")
    predicted = sum(one[4] is not None for one in every)
    print(f"\n{good} of {len(every)} rows within {WITHIN:.0%} ({good / len(every):.0%});", end=" ")
    print(f"{good} of the {predicted} that the model predicts")
    steady = [one for one in every if one[1].endswith("per GPU")]
    close = sum(p is not None and m is not None and abs(p / m - 1) <= WITHIN for *_, m, p in steady)
    rest = len(every) - len(steady)
    print(f"without the {len(steady)} rows per GPU, which hardly change over a series:", end=" ")
    print(f"{good - close} of {rest} ({(good - close) / rest:.0%})")
    print("The assumed values in series.json were chosen with the measured ones known.")


if __name__ == "__main__":
    main()
