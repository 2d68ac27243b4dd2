"""Draw the loss over time of all paces, from what bench/paces.py wrote, or of all codecs.

    python docs/images/pace_curves.py bench/results/paces.json [FOLDER]
    python docs/images/pace_curves.py bench/results/codecs.json [FOLDER]

Figures of paces: 4 workers on one host (pace-loss.svg), slow workers (pace-stragglers.svg) and slow
links (pace-links.svg); of codecs: codec-loss.svg and codec-links.svg. They are named at the right,
the first at the target on top, with the seconds that it took. Needs matplotlib (pip install
matplotlib), which nothing else here does.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter
except ModuleNotFoundError:
    sys.exit("pace_curves: matplotlib is missing; pip install matplotlib")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from pace_runs.figures import rank, target_of
from pace_runs.table import REFERENCE, TABLE, Row
from slow_runs import codecs

FAMILIES = {
    "lockstep": ("#333333", "every step, all workers"),
    "servers": ("#c44e52", "every step, through servers or shared memory"),
    "local": ("#4c72b0", "local steps"),
    "elastic": ("#8c6bb1", "elastic averaging"),
    "gossip": ("#2a9d5c", "neighbours"),
    "bits": ("#c44e52", "fewer bits of each value"),
    "values": ("#4c72b0", "fewer values"),
    "rank": ("#2a9d5c", "low rank"),
}
DASHES = [
    "solid",
    (0, (5, 1.5)),
    (0, (1.5, 1.5)),
    (0, (5, 1.5, 1.5, 1.5)),
    (0, (9, 2)),
    (0, (3, 4)),
]
Results = Mapping[str, Mapping[str, Any]]


def rows_of(labels: Collection[str]) -> Sequence[Row]:
    """Return the table of paces, or one of codecs if that is what these are."""
    if set(labels) <= {row.label for row in TABLE}:
        return TABLE
    return codecs.rows([label for label in labels if label != REFERENCE])


def looks_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return colour and dashes: the colour says the family, the dashes which of it."""
    looks, seen = {}, Counter[str]()
    for row in rows:
        dashes = DASHES[seen[row.family] % len(DASHES)]
        looks[row.label] = {"color": FAMILIES[row.family][0], "linestyle": dashes}
        seen[row.family] += 1
    return looks


def draw(axes: Any, title: str, found: Results, looks: Mapping[str, dict[str, Any]]) -> None:
    """Draw one panel."""
    curves = {label: told["curve"] for label, told in found.items() if "failed" not in told}
    target = target_of(curves[REFERENCE])
    places = rank(curves, target)
    ends_s = [curve[-1][1] for curve in curves.values()]
    axes.set_xscale("log")
    start_s = min(curve[0][1] for curve in curves.values())
    axes.set_xlim(0.8 * start_s, max(ends_s) * 1.05)
    losses = [loss for curve in curves.values() for _, _, loss in curve if loss == loss]
    bottom, top = min(losses) - 0.02, target + 2.5 * (target - min(losses)) + 0.1
    axes.set_ylim(bottom, top)
    for number, (label, at_s) in enumerate(places):
        _, seconds, values = zip(*curves[label], strict=True)
        look, is_reference = looks[label], label == REFERENCE
        axes.plot(seconds, values, linewidth=2.4 if is_reference else 1.3, **look)
        if at_s is not None:
            axes.plot([at_s], [target], "o", color=look["color"], markersize=3.5)
        _name(axes, label, at_s, number / max(1, len(places) - 1), look)
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    axes.set_title(f"{title}: seconds to a loss of {target:.2f}", fontsize=10, loc="left")
    axes.set(xlabel="seconds", ylabel="held-out loss")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)


def _name(axes: Any, label: str, at_s: float | None, down: float, look: Mapping[str, Any]) -> None:
    """Write one line of the ranking beside the panel, with a piece of its curve."""
    height = 0.985 - 0.97 * down
    across = axes.transAxes
    axes.plot([1.02, 1.075], [height] * 2, transform=across, clip_on=False, linewidth=1.6, **look)
    took = f"{at_s:.1f} s" if at_s is not None else "not reached"
    weight = "bold" if label == REFERENCE else "normal"
    style = {"transform": across, "fontsize": 7.5, "va": "center", "color": look["color"]}
    axes.text(1.085, height, label, weight=weight, **style)
    axes.text(1.47, height, took, ha="right", weight=weight, **style)


def figure(panels: Mapping[str, Results], target: Path) -> None:
    """Draw panels one below the other, and write them."""
    plt.rcParams["svg.hashsalt"] = "paceline"  # the same picture gives the same file
    inches = 4.0 * len(panels) + 0.5
    drawing, all_axes = plt.subplots(len(panels), figsize=(8.0, inches), squeeze=False)
    labels = dict.fromkeys(label for found in panels.values() for label in found)
    rows = rows_of(labels)
    looks, families = looks_of(rows), dict.fromkeys(row.family for row in rows)
    for axes, (title, found) in zip(all_axes[:, 0], panels.items(), strict=True):
        draw(axes, title, found, looks)
    named = [FAMILIES[family] for family in families]
    lines = [plt.Line2D([], [], color=colour, label=words) for colour, words in named]
    drawing.legend(handles=lines, loc="lower left", ncol=3, frameon=False, fontsize=7.5)
    below, above = 1.0 / inches, 1 - 0.3 / inches
    drawing.subplots_adjust(left=0.07, right=0.69, bottom=below, top=above, hspace=0.25)
    drawing.savefig(target, metadata={"Date": None})
    plt.close(drawing)
    sys.stdout.write(f"written to {target}\n")


def panels_of(content: Mapping[str, Any]) -> dict[str, dict[str, Results]]:
    """Return the figures that can be drawn: file, panels by title, curves by pace."""
    found: dict[str, dict[str, Results]] = {}
    of = content.get("of", "pace")
    if "loss" in content:
        book = content["loss"]["tasks"]["book"]
        first = {label: told[0] for label, told in book.items() if label != "one process"}
        found[f"{of}-loss.svg"] = {"4 workers on one host of 2 cores": first}
    if "stragglers" in content:
        titles = {"steady": "one worker steadily 4 x slower", "stalls": "random stalls"}
        scenarios = content["stragglers"]["scenarios"]
        found[f"{of}-stragglers.svg"] = {titles[name]: scenarios[name] for name in titles}
    if "links" in content:
        rates = content["links"]["rates_mbit"]
        found[f"{of}-links.svg"] = {f"links of {rate} Mbit/s": rates[rate] for rate in rates}
    return found


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name, panels in panels_of(content).items():
        figure(panels, folder / name)


if __name__ == "__main__":
    main()
