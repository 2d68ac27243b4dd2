"""Choose where to split a model: the slowest stage should be as fast as possible.

Layers run one after the other, so a partition of n layers into s stages is a choice of s - 1 cuts,
and the best is found exactly, in two rounds of dynamic programming over (stages, layers): first the
smallest possible time of the slowest stage; then, among all partitions that reach it, the one that
sends the least across its boundaries and, among these, the most even one.

If a process holds several stages, the slowest process counts, and its stages are not neighbours.
From the best partition of the first kind, cuts are then moved, one or two at a time, as long as
that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.graph import LayerGraph
from paceline.model_parallel.pipeline.measuring import LayerCost
from paceline.model_parallel.pipeline.splitting import split
from paceline.model_parallel.pipeline.stage_program import CannotSplit


def partition(
    costs: Sequence[float], num_stages: int, crossing: Sequence[float] | None = None
) -> list[int]:
    """Return the index of the first layer of stages 1, 2, ...; no stage is empty.

    `crossing[i]` is what a cut before layer i sends (bytes); it decides between partitions whose
    slowest stages are equal.
    """
    count = len(costs)
    if num_stages < 1:
        raise UsageError(f"{num_stages} stages: there must be at least one")
    if num_stages > count:
        raise UsageError(f"{count} layers cannot be split into {num_stages} stages")
    if crossing is not None and len(crossing) != count:
        raise UsageError(f"{count} costs, but {len(crossing)} crossings; pass one for each layer")
    sums = [0.0, *accumulate(costs)]
    sent = [0.0] * count if crossing is None else list(crossing)
    slowest = _smallest_maximum(sums, num_stages)
    # best[i]: (sent, unevenness, cuts) of the first i layers in the stages so far.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
    best[0] = (0.0, 0.0, ())
    for stage in range(num_stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(stage + 1, count + 1):
            for begin in range(stage, end):
                before = best[begin]
                time = sums[end] - sums[begin]
                if before is None or time > slowest:
                    continue
                cuts = (*before[2], begin) if stage else ()
                cost = before[0] + (sent[begin] if stage else 0.0)
                candidate = (cost, before[1] + time * time, cuts)
                kept = following[end]
                if kept is None or candidate < kept:
                    following[end] = candidate
        best = following
    found = best[count]
    assert found is not None  # one partition reaches the smallest maximum
    return list(found[2])


def _smallest_maximum(sums: list[float], num_stages: int) -> float:
    """Return the time of the slowest stage of the best partition."""
    count = len(sums) - 1
    best = [0.0] + [float("inf")] * count
    for stage in range(num_stages):
        following = [float("inf")] * (count + 1)
        for end in range(stage + 1, count + 1):
            following[end] = min(
                max(best[begin], sums[end] - sums[begin]) for begin in range(stage, end)
            )
        best = following
    return best[count]


def balance(costs: Sequence[float], cuts: Sequence[int], stage_ranks: Sequence[int]) -> list[int]:
    """Move cuts until neither the slowest process nor the slowest stage gets faster.

    `stage_ranks` has the process of each stage.
    """
    sums = [0.0, *accumulate(costs)]
    count = len(costs)

    def cost_of(chosen: Sequence[int]) -> tuple[float, float]:
        stages = [sums[end] - sums[begin] for begin, end in pairwise([0, *chosen, count])]
        of_process = dict.fromkeys(stage_ranks, 0.0)
        for owner, time in zip(stage_ranks, stages, strict=True):
            of_process[owner] += time
        return max(of_process.values()), max(stages)

    best = list(cuts)
    while True:
        found = min(_moved(best, count), key=cost_of, default=best)
        if cost_of(found) >= cost_of(best):
            return best
        best = found


def _moved(cuts: Sequence[int], count: int) -> Iterator[list[int]]:
    """Yield all cuts of which one is moved anywhere, or two are moved by one layer."""
    for number in range(len(cuts)):
        bounds = [0, *cuts, count]
        for place in range(bounds[number] + 1, bounds[number + 2]):
            yield [*cuts[:number], place, *cuts[number + 1 :]]
    for one, other in combinations(range(len(cuts)), 2):
        for step in (-1, 1):
            for other_step in (-1, 1):
                moved = list(cuts)
                moved[one] += step
                moved[other] += other_step
                if all(a < b for a, b in pairwise([0, *moved, count])):
                    yield moved


def choose_split_points(
    graph: LayerGraph,
    costs: Sequence[LayerCost],
    num_stages: int,
    stage_ranks: Sequence[int] | None = None,
) -> list[str]:
    """Return the layers at which stages 1, 2, ... start, by measured costs.

    `stage_ranks` has the process of each stage, if a process holds several.
    """
    if num_stages < 1:
        raise UsageError(f"{num_stages} stages: there must be at least one")
    forbidden = set(graph.repeated)
    while True:
        starts = _choose(graph, costs, num_stages, forbidden, stage_ranks)
        try:
            split(graph, starts)
        except CannotSplit as error:
            forbidden.add(error.layer)
        else:
            return starts


def _choose(
    graph: LayerGraph,
    costs: Sequence[LayerCost],
    num_stages: int,
    forbidden: set[str],
    stage_ranks: Sequence[int] | None,
) -> list[str]:
    by_name = {cost.name: cost for cost in costs}
    missing = [name for name in graph.layers if name not in by_name]
    if missing:
        raise UsageError(f"no costs of {', '.join(missing[:5])}; measure the model that was traced")
    # A layer that cannot start a stage is grouped with the layers before it.
    groups: list[tuple[str, float]] = []
    sent: list[float] = []
    before = 0.0
    for _, name in graph.training.layer_calls():
        cost = by_name[name]
        time = (cost.forward_s + cost.backward_s) / cost.calls
        if groups and name in forbidden:
            groups[-1] = (groups[-1][0], groups[-1][1] + time)
        else:
            groups.append((name, time))
            sent.append(before)
        before = cost.output_bytes
    if len(groups) < num_stages:
        raise UsageError(_too_few(graph, [name for name, _ in groups], num_stages, forbidden))
    times = [time for _, time in groups]
    cuts = partition(times, num_stages, sent)
    if stage_ranks is not None and len(set(stage_ranks)) < num_stages:
        cuts = balance(times, cuts, stage_ranks)
    return [groups[cut][0] for cut in cuts]


def _too_few(graph: LayerGraph, names: list[str], num_stages: int, forbidden: set[str]) -> str:
    several = [name for name in graph.layers if name in forbidden]
    text = f"{num_stages} stages need {num_stages} layers, and the model has {len(names)}: "
    text += ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    if several:
        text += f" (not counted, since no stage can start there: {', '.join(several[:5])})"
    return text + "; use fewer stages, or name layers inside of these as split points"
