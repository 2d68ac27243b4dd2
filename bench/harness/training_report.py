"""Tables of the training benchmark: throughput beside both ceilings and DDP, overhead, memory.

Everything is compared by throughput of all workers together. A share of the ceiling is given three
times: by the fastest step, by the median step, and by the median turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from models import TASKS

from harness.training import Contender, Work, as_json

_BY = ("min", "median", "turn")
CEILING, KEPT, DDP = "independent", "independent-kept", "ddp-gloo"


class Comparison:
    """The contenders of one work, measured."""

    def __init__(self, work: Work, contenders: Sequence[Contender]) -> None:
        self.work = work
        self._batch = TASKS[work.model].batch
        self._contenders = {one.name: one for one in contenders if one.step_times()}

    def times(self, name: str) -> dict[str, float]:
        """Return the seconds of a step by minimum, by median and by turn."""
        one = self._contenders[name]
        steps, turns = one.step_times(), one.turns_s
        found = (min(steps), statistics.median(steps), statistics.median(turns))
        return dict(zip(_BY, found, strict=True))

    def ratio(self, name: str, reference: str) -> dict[str, float] | None:
        """Return how many times the reference's throughput `name` has, or None if unknown."""
        if name not in self._contenders or reference not in self._contenders:
            return None
        ours, theirs = self._rates(name), self._rates(reference)
        return {by: ours[by] / theirs[by] for by in _BY}

    def _rates(self, name: str) -> dict[str, float]:
        samples = self._batch * self._contenders[name].world
        return {by: samples / seconds for by, seconds in self.times(name).items()}

    def show(self) -> None:
        batch = self._batch
        print(f"\n{self.work.title}: {TASKS[self.work.model].title}, batch {batch} per worker")
        head = f"{'contender':25} {'min ms':>7} {'median':>7} {'turn':>7} {'samples/s':>9}"
        print(f"{head}  {'% of ceiling':>17}  {'% memory kept':>17}  {'x DDP gloo':>14}")
        for name, one in self._contenders.items():
            times = self.times(name)
            text = f"{one.label:25} " + " ".join(f"{times[by] * 1e3:7.1f}" for by in _BY)
            text += f" {self._rates(name)['median']:9.1f}"
            for reference, shown in ((CEILING, _percent), (KEPT, _percent), (DDP, _factor)):
                text += "  " + shown(self.ratio(name, reference))
            print(text.rstrip(), flush=True)

    def as_json(self) -> dict[str, Any]:
        rows = []
        for name, one in self._contenders.items():
            row = {"contender": name, "workers": one.world, "step_s": self.times(name)}
            row["samples_per_s"] = self._rates(name)
            row["share_of_ceiling"] = self.ratio(name, CEILING)
            row["share_of_ceiling_memory_kept"] = self.ratio(name, KEPT)
            row["times_ddp_gloo"] = self.ratio(name, DDP)
            rows.append({**row, **as_json(one)})
        return {"title": self.work.title, "rows": rows}

    def overhead_lines(self) -> list[tuple[str, str, str]]:
        """Return what each contender adds to a step of the better ceiling."""
        references = [name for name in (CEILING, KEPT) if name in self._contenders]
        if not references:
            return []
        lines = []
        for name, one in self._contenders.items():
            if name in references:
                continue
            added = {
                by: self.times(name)[by] - min(self.times(r)[by] for r in references) for by in _BY
            }
            reported = ", ".join(f"{seconds * 1e3:.2f} ms by {by}" for by, seconds in added.items())
            share = f"{added['median'] / 0.1:.1%} of a step of 100 ms"
            lines.append(
                (f"{one.label}, {self.work.optimizer}", "goal < 3 %", f"{reported}; {share}")
            )
        return lines


def _percent(ratio: dict[str, float] | None) -> str:
    return " " * 17 if ratio is None else " ".join(f"{ratio[by] * 100:5.1f}" for by in _BY)


def _factor(ratio: dict[str, float] | None) -> str:
    return " " * 14 if ratio is None else " ".join(f"{ratio[by]:4.2f}" for by in _BY)


def promise(
    comparisons: Sequence[Comparison],
    models: Sequence[str],
    names: Sequence[str],
    reference: str,
    world: int,
) -> str:
    """Return the best of `names` beside the reference, at the worst model and optimizer.

    Empty if it was not measured.
    """
    worst: dict[str, tuple[float, str]] = {}
    for comparison in comparisons:
        work = comparison.work
        ratios = [comparison.ratio(name, reference) for name in names]
        known = [ratio for ratio in ratios if ratio is not None]
        if work.world != world or work.model not in models or not known:
            continue
        for by in _BY:
            best = max(ratio[by] for ratio in known)
            here = (best, f"{work.model} {work.optimizer}")
            worst[by] = min(worst.get(by, here), here)
    return ", ".join(f"{value:.2f} by {by} ({where})" for by, (value, where) in worst.items())


def show_memory(label: str, workers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Print the memory of one contender's workers; return the line."""
    total = sum(one["Pss"] for one in workers)
    row = {
        "workers": len(workers),
        "total_mb": total,
        "per_worker_mb": total / len(workers),
        "shared_total_mb": sum(one.get("Pss_Shmem", 0.0) for one in workers),
        "anonymous_total_mb": sum(one.get("Pss_Anon", 0.0) for one in workers),
        "files_total_mb": sum(one.get("Pss_File", 0.0) for one in workers),
    }
    numbers = " ".join(f"{value:10.0f}" for value in row.values())
    print(f"{label:25} {numbers}", flush=True)
    return row
