"""Automatic splits of uneven models beside the best of all cuts.

Every run of consecutive layers that could be a stage is measured alone, forward and backward, in
this process. A cut is as slow as its slowest stage; the best is found by trying all of them. The
automatic one, which only knows its own measurements of single layers, is judged by the same times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mesh_runs.models import Uneven
from mesh_runs.report import Figure

_WIDTH, _BATCH = 128, 256
_STAGES = (2, 4)
Times = dict[tuple[int, int], float]  # of the layers from here to before there


def measure(*, quick: bool) -> tuple[dict[str, Any], list[Figure]]:
    """Measure models of several depths; return what was found, and the worst of it."""
    torch.set_num_threads(1)
    depths = ((8, 2),) if quick else ((8, 2), (12, 3), (16, 4))
    print("\nautomatic split, early layers 10 x heavier: slowest stage")
    head = f"{'layers':>6} {'heavy':>5} {'stages':>6} {'automatic ms':>13} {'best ms':>8}"
    print(f"{head}  ratio  starts")
    rows = []
    for layers, heavy in depths:
        torch.manual_seed(1)
        model = Uneven(layers, _WIDTH, heavy)
        times = stage_times(model, repeats=2 if quick else 5)
        for count in _STAGES:
            starts = automatic(model, count)
            slowest, best = slowest_stage(times, starts), best_cut(times, count)
            row = {"layers": layers, "heavy": heavy, "stages": count, "starts": starts}
            rows.append({**row, "slowest_s": slowest, "best_s": best[0], "best_starts": best[1]})
            text = f"{layers:6} {heavy:5} {count:6} {slowest * 1e3:13.2f} {best[0] * 1e3:8.2f}"
            print(f"{text}  {slowest / best[0]:5.2f}  {starts}, best {best[1]}", flush=True)
    worst = max(row["slowest_s"] / row["best_s"] for row in rows)
    figure = ("automatic split, slowest stage / best", "must <= 1.10", f"{worst:.3f} at worst")
    return {"rows": rows}, [figure]


def automatic(model: Uneven, count: int) -> list[int]:
    """Return the first layers of the stages when the user does not name them."""
    from paceline.model_parallel.pipeline.measuring import measure_layers
    from paceline.model_parallel.pipeline.partitioning import choose_split_points
    from paceline.model_parallel.pipeline.tracing import trace

    example = torch.randn(_BATCH, _WIDTH)
    starts = choose_split_points(trace(model, (example,)), measure_layers(model, example), count)
    number = {f"layers.{index}": index for index in range(len(model.layers))}
    return [{**number, "head": len(model.layers)}[name] for name in starts]


def stage_times(model: Uneven, repeats: int) -> Times:
    """Return the fastest forward and backward pass of everything that could be a stage."""
    chain = [*model.layers, model.head]
    ranges = list(combinations(range(len(chain) + 1), 2))
    times: Times = {}
    for _ in range(1 + repeats):  # from the outside in: noise hits neighbours alike
        for begin, end in ranges:
            taken = _time(chain[begin:end])
            times[begin, end] = min(taken, times.get((begin, end), taken))
    return times


def _time(layers: Sequence[nn.Module]) -> float:
    x = torch.randn(_BATCH, _WIDTH, requires_grad=True)
    start_s = time.perf_counter()
    y: Tensor = x
    for layer in layers:
        y = layer(y)
    y.sum().backward()
    taken_s = time.perf_counter() - start_s
    for layer in layers:
        layer.zero_grad()
    return taken_s


def slowest_stage(times: Times, starts: Sequence[int]) -> float:
    """Return the time of the slowest stage of a cut."""
    length = max(end for _, end in times)
    return max(times[stage] for stage in pairwise([0, *starts, length]))


def best_cut(times: Times, count: int) -> tuple[float, list[int]]:
    """Try all cuts; return the time of the slowest stage of the best one, and its starts."""
    length = max(end for _, end in times)
    cuts = combinations(range(1, length), count - 1)
    return min((slowest_stage(times, cut), list(cut)) for cut in cuts)
