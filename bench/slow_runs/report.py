"""The table of one rate: throughput beside the ceilings and DDP's ways, and what was sent.

Everything is compared by the throughput of both workers together, by the best and by the median
turn. No processes here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness.training_kinds import kind_of

from slow_runs.turns import Line

CEILING, KEPT = "independent", "independent-kept"
PLAIN, FP16, POWERSGD = "ddp-gloo", "ddp-fp16", "ddp-powersgd"
_BY = ("best", "median")
_PROMISES = {  # by rate in Mbit/s and what is compared with
    (1000, FP16): "must 1.5",
    (1000, POWERSGD): "must 1.3",
    (1000, CEILING): "goal 0.85",
    (100, "better"): "must 1.2",
    (100, CEILING): "goal 0.85",
}
Figure = tuple[str, str, str]


class Link:
    """The contenders at one rate, measured."""

    def __init__(
        self, rate_mbit: int, samples: int, lines: Sequence[Line], names: Sequence[str]
    ) -> None:
        self.rate_mbit, self._samples = rate_mbit, samples  # those of both workers in a step
        self._lines = {line.name: line for line in lines if line.turns_s}
        self._failed = [name for name in names if name not in self._lines]

    def rates(self, name: str) -> dict[str, float]:
        """Return samples per second by the best and by the median turn."""
        turns_s = self._lines[name].turns_s
        found = (min(turns_s), statistics.median(turns_s))
        return {by: self._samples / s for by, s in zip(_BY, found, strict=True)}

    def ratio(self, name: str, *references: str) -> dict[str, float] | None:
        """Return how many times the throughput of the best reference `name` has; None: unknown."""
        if not {name, *references} <= self._lines.keys():
            return None  # the missing one may be the best
        ours, others = self.rates(name), [self.rates(one) for one in references]
        return {by: ours[by] / max(other[by] for other in others) for by in _BY}

    def best_of_ours(self) -> str | None:
        """Return our fastest contender by median that averages the gradients of every step."""
        ours = [
            name
            for name in self._lines
            if kind_of(name).library == "ours" and kind_of(name).is_coordinated
        ]
        return max(ours, key=lambda name: self.rates(name)["median"], default=None)

    def show(self) -> None:
        width = max([24, *(len(line.label) for line in self._lines.values())])
        print(f"\n{self.rate_mbit} Mbit/s: samples/s of both workers; every pair: by best, median")
        head = f"{'contender':{width}} {'samples/s':>13}  {'% of ceiling':>12}  {'% mem. kept':>12}"
        print(f"{head}  {'x DDP':>12}  {'x fp16':>12}  {'x PowerSGD':>12}  {'MB/step':>8}")
        for name, line in self._lines.items():
            rates = self.rates(name)
            text = f"{line.label:{width}} {rates['best']:6.1f} {rates['median']:6.1f}"
            for reference in (CEILING, KEPT):
                text += "  " + _pair(self.ratio(name, reference), 100, 1)
            for reference in (PLAIN, FP16, POWERSGD):
                text += "  " + _pair(self.ratio(name, reference), 1, 2)
            print(f"{text}  {line.sent_bytes / 1e6:8.3f}", flush=True)
        for name in self._failed:
            print(f"{kind_of(name).label:{width}} failed, see above", flush=True)

    def figures(self, codec: str | None = None) -> list[Figure]:
        """Return the promised figures of one of ours, by default of the fastest."""
        name = codec or self.best_of_ours()
        if name is None:
            return []
        beside = {
            PLAIN: ("DDP gloo", [PLAIN]),
            FP16: ("DDP's fp16 hook", [FP16]),
            POWERSGD: ("DDP's PowerSGD", [POWERSGD]),
            "better": ("the better of both hooks", [FP16, POWERSGD]),
            CEILING: ("the ceiling", [CEILING]),
            KEPT: ("the ceiling, memory kept", [KEPT]),
        }
        found = []
        for key, (label, references) in beside.items():
            ratio = self.ratio(name, *references)
            reported = (
                ", ".join(f"{ratio[by]:.2f} by {by}" for by in _BY) if ratio else "not measured"
            )
            promise = _PROMISES.get((self.rate_mbit, key), "")
            found.append((f"{self.rate_mbit} Mbit/s, / {label}", promise, f"{reported} ({name})"))
        return found

    def as_json(self) -> dict[str, Any]:
        references = (CEILING, KEPT, PLAIN, FP16, POWERSGD)
        rows = [
            {
                "contender": name,
                "samples_per_s": self.rates(name),
                "times": {other: self.ratio(name, other) for other in references},
                "turns_s": list(line.turns_s),
                "sent_bytes_per_step": line.sent_bytes,
            }
            for name, line in self._lines.items()
        ]
        return {"rate_mbit": self.rate_mbit, "rows": rows, "failed": self._failed}


def _pair(ratio: dict[str, float] | None, times: int, digits: int) -> str:
    if ratio is None:
        return " " * 12
    return " ".join(f"{ratio[by] * times:{6 if by == 'median' else 5}.{digits}f}" for by in _BY)
