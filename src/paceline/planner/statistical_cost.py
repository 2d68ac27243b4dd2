"""What a pace costs in loss: exact, from our tables, measured for this model, or unknown.

The tables are docs/choosing-a-pace.md and docs/codec-figures.md: final loss after the same number
of samples on two small tasks, compared with allreduce. They do not carry over to every model, so
each entry says where it is from.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.planner.candidates import Candidate

_TABLE = {
    "ps": "",
    "ssp": "within 2 sd",
    "async": "within 2 sd",
    "local": "+0.05 (book, H = 8)",
    "post_local": "+0.03 (book, H = 8)",
    "bmuf": "within 2 sd",
    "diloco": "+0.04 (book, H = 50)",
}
_CODECS = {
    "bf16": "within 2 sd",
    "fp16": "within 2 sd",
    "int8": "within 2 sd",
    "int4": "+0.02 (book)",
    "onebit": "+0.09 (book)",
    "topk": "+0.08 (book)",
    "powersgd": "+0.13 (book)",
    "dgc": "+0.27 (book)",
}
_BLOCKS = {"local": 8, "diloco": 50, "bmuf": 10, "post_local": 8, "ssp": 3}


@dataclass(frozen=True)
class StatisticalCost:
    """`source`: "exact", "measured", "table" or "unknown"."""

    source: str
    text: str

    def __str__(self) -> str:
        return self.text if self.source == self.text else f"{self.source}: {self.text}"


def statistical_cost(
    candidate: Candidate, measured: dict[str, float] | None = None
) -> StatisticalCost:
    """Return what is known of a candidate's loss; `measured`: loss against allreduce by pace."""
    if measured and str(candidate.pace) in measured:
        return StatisticalCost("measured", f"{measured[str(candidate.pace)]:+.3f} here")
    if candidate.is_exact:
        return StatisticalCost("exact", "exact")
    name, codec = candidate.pace.name, candidate.codec
    found = []
    if name not in ("allreduce", "ps"):
        tested = _BLOCKS.get(name)
        if name not in _TABLE or (tested is not None and candidate.pace.value > 2 * tested):
            return StatisticalCost("unknown", "unknown")
        found.append(_TABLE[name])
    if codec.is_on:
        if codec.name not in _CODECS:
            return StatisticalCost("unknown", "unknown")
        found.append(_CODECS[codec.name])
    if len(found) > 1:
        return StatisticalCost("unknown", "unknown")  # both effects together were not measured
    return StatisticalCost("table", found[0])
