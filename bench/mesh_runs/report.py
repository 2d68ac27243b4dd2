"""Tables of the model-parallel benchmark, and what is read off them.

A bubble is the share of a pipelined step in which processes wait: 1 - ideal / step. The ideal is
what the stages take for the same microbatches and the same update when each runs alone, in two
processes at the same time, in turns of the same run; the mean of both stages. By theory it
is (p - 1) / (v m + p - 1) for p processes with v stages each, and m microbatches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mesh_runs.contest import Contender

Figure = tuple[str, str, str]
_BY: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "median": statistics.median}


class Table:
    """The contenders of one comparison with one batch."""

    def __init__(self, title: str, batch: int, contenders: Sequence[Contender]) -> None:
        self.title, self.batch = title, batch
        self._contenders = {one.name: one for one in contenders if one.steps_s.get(batch)}

    def step_s(self, name: str) -> dict[str, float]:
        """Return the time of a step by minimum and by median."""
        return {by: of(self._contenders[name].steps_s[self.batch]) for by, of in _BY.items()}

    def times(self, name: str, reference: str) -> dict[str, float] | None:
        """Return how many times as fast as the reference `name` is, or None if unknown."""
        if name not in self._contenders or reference not in self._contenders:
            return None
        ours, theirs = self.step_s(name), self.step_s(reference)
        return {by: theirs[by] / ours[by] for by in _BY}

    def ideal_s(self, name: str) -> dict[str, float]:
        """Return what stages that run alone take for a step: the mean of them."""
        stages = self._contenders[name].own_s[self.batch]
        return {by: statistics.fmean(of(stage) for stage in stages) for by, of in _BY.items()}

    def bubble(self, name: str) -> dict[str, float] | None:
        """Return the share of a pipelined step in which no stage computes."""
        if name not in self._contenders or "alone" not in self._contenders:
            return None
        kind = self._contenders[name].kind
        keeps = kind.mesh or kind.keeps_memory
        ideal, step = self.ideal_s("alone-kept" if keeps else "alone"), self.step_s(name)
        return {by: 1 - ideal[by] / step[by] for by in _BY}

    def show(self, references: Sequence[str], microbatches: int = 0) -> None:
        """Print it; with a number of microbatches, with bubbles."""
        print(f"\n{self.title}, batch {self.batch}")
        head = f"{'contender':28} {'min ms':>8} {'median':>8} {'steps/s':>8}"
        known = [name for name in references if name in self._contenders]
        for name in known:
            head += f"  {'x ' + name:>16}"
        print(head + (f"  {'bubble %':>12}  theory %" if microbatches else ""))
        for name, one in self._contenders.items():
            taken = self.step_s(name)
            text = f"{one.kind.label:28} {taken['min'] * 1e3:8.1f} {taken['median'] * 1e3:8.1f}"
            text += f" {1 / taken['median']:8.2f}"
            for reference in known:
                text += f"  {_factor(self.times(name, reference)):>16}"
            if microbatches and one.kind.way == "pp":
                bubble = self.bubble(name)
                shown = (
                    " ".join(f"{share * 100:5.1f}" for share in bubble.values()) if bubble else ""
                )
                text += f"  {shown:>12}  {theory(name, microbatches) * 100:8.1f}"
            print(text.rstrip(), flush=True)

    def figure(self, what: str, promise: str, name: str, references: Sequence[str]) -> Figure:
        """Return how many times as fast as the best of the references `name` is."""
        ratios = [r for r in (self.times(name, other) for other in references) if r]
        if not ratios:
            return (what, promise, "not measured")
        worst = {by: min(ratio[by] for ratio in ratios) for by in _BY}
        return (what, promise, ", ".join(f"{worst[by]:.2f} by {by}" for by in _BY))

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "contender": name,
                "steps_s": one.steps_s[self.batch],
                "own_s": one.own_s[self.batch],
                "loss": one.losses[self.batch],
                "bubble": self.bubble(name) if one.kind.way == "pp" else None,
            }
            for name, one in self._contenders.items()
        ]
        return {"title": self.title, "batch": self.batch, "rows": rows}


def _factor(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['min']:.2f} {ratio['median']:.2f}"


def theory(name: str, microbatches: int, processes: int = 2) -> float:
    """Return the bubble that a schedule has by theory; a zero-bubble one has none at best."""
    if name.endswith("-zero"):
        return 0.0
    stages = 2 if name.endswith("-interleaved") else 1
    return (processes - 1) / (stages * microbatches + processes - 1)


def bubble_figure(table: Table, name: str, microbatches: int) -> Figure:
    """Return the bubble of a schedule beside the theoretical one."""
    expected, found = theory(name, microbatches), table.bubble(name)
    what, promise = f"bubble of {name}", f"must <= {1.1 * expected:.1%}"
    if found is None:
        return (what, promise, "not measured")
    reported = ", ".join(f"{share:.1%} by {by}" for by, share in found.items())
    return (what, promise, f"{reported} (theory {expected:.1%})")


def show_memory(title: str, found: dict[str, list[dict[str, Any]]], whole: str) -> list[Figure]:
    """Print the memory of each contender's processes beside that of the replicated model."""
    print(f"\n{title}")
    print(f"{'contender':28} {'held MB':>8} {'PSS MB':>8}  {'held / replicated':>18}")
    known = {name: processes for name, processes in found.items() if processes}
    if whole not in known:
        return []
    full = max(one["held_bytes"] for one in known[whole])
    lines = []
    for name, processes in known.items():
        held = max(one["held_bytes"] for one in processes)
        pss = statistics.fmean(one["Pss"] for one in processes)
        print(f"{name:28} {held / 1e6:8.1f} {pss:8.0f}  {held / full:18.1%}", flush=True)
        lines.append((f"memory of {name} / replicated", "must <= 60 %", f"{held / full:.1%}"))
    return [line for line in lines if "fsdp-ours" in line[0]]
