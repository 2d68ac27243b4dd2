"""Draw the loss over time with one slow worker, from what bench/parameter_server.py wrote.

    python docs/images/straggler_curves.py bench/results/parameter-server-....json

Each pace is drawn at the learning rate with which it came to the target first; the others of its
rates are thin lines. Needs matplotlib (pip install matplotlib), which nothing else here does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

try:
    import matplotlib.pyplot as plt
except ModuleNotFoundError:
    sys.exit("straggler_curves: matplotlib is missing; pip install matplotlib")

TARGET = Path(__file__).parent / "straggler-curves.svg"
COLOURS = {"ps": "#4c72b0", "ssp:3": "#dd8452", "async": "#2a9d5c"}


def best(learnings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run that was first at the target; if none was, the one with the least loss."""
    reached = [run for run in learnings if run["reached_s"] is not None]
    if reached:
        return min(reached, key=lambda run: run["reached_s"])
    return min(learnings, key=lambda run: run["curve"][-1][1])


def draw(axes: Any, pace: str, learnings: list[dict[str, Any]]) -> None:
    colour, winner = COLOURS[pace], best(learnings)
    for run in learnings:
        seconds, losses = zip(*run["curve"], strict=True)
        if run is not winner:
            axes.plot(seconds, losses, color=colour, alpha=0.25, linewidth=0.8)
            continue
        when = run["reached_s"]
        told = f"{when:.1f} s to the target" if when is not None else "target not reached"
        label = f"{pace}, lr {run['rate']:g}: {told}"
        axes.plot(seconds, losses, color=colour, linewidth=2.0, label=label)
        if when is not None:
            axes.plot([when, when], [1e-3, 10], color=colour, linestyle=":", linewidth=1.0)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["stragglers"]
    target = content["target_loss"]
    plt.rcParams["svg.hashsalt"] = "paceline"  # the same picture gives the same file
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for pace in COLOURS:
        if runs := [run for run in content["learnings"] if run["pace"] == pace]:
            draw(axes, pace, runs)
    axes.axhline(target, color="black", linewidth=0.8, linestyle="--")
    axes.set(yscale="log", ylim=(0.02, 3.0), xlabel="seconds", ylabel="loss over all digits")
    axes.set_xlim(left=0)
    axes.set_title("4 workers, one of them steadily 4 x slower")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(TARGET, metadata={"Date": None})
    sys.stdout.write(f"written to {TARGET}\n")


if __name__ == "__main__":
    main()
