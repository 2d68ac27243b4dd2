"""The closing lines of a run: each promised figure at its worst size, beside what was promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.report import Section, size_text

PEERS = ("openmpi", "mpich", "deepspeed")


def against(section: Section, ours: str, theirs: Sequence[str]) -> str:
    """Return how many times faster `ours` is than the best of `theirs`, at the worst size."""
    by_size: dict[int, dict[str, dict[str, Any]]] = {}
    for row in section.rows:
        by_size.setdefault(row["bytes"], {})[row["contender"]] = row
    ratios: dict[str, list[tuple[float, int]]] = {"min_s": [], "median_s": []}
    for num_bytes, rows in by_size.items():
        others = [rows[name] for name in rows if name.startswith(tuple(theirs))]
        if ours in rows and others:
            for key, found in ratios.items():
                best = min(row[key] for row in others)
                found.append((best / rows[ours][key], num_bytes))
    if not ratios["min_s"]:
        return "not measured"
    (low_min, at_min), (low, at) = min(ratios["min_s"]), min(ratios["median_s"])
    return f"{low_min:.2f} by minimum ({size_text(at_min)}), {low:.2f} by median ({size_text(at)})"


def show(
    lines: Sequence[tuple[str, str, str]], title: str = "Figures, each at its worst size"
) -> None:
    """Print figure, promise and what was measured."""
    print(f"\n{title}")
    for figure, promise, measured in lines:
        print(f"  {figure:52} {promise:24} {measured}")
