"""What comes out: a table for people, JSON for comparison, and the facts about the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.rounds import Runner

_BENCH = Path(__file__).resolve().parent.parent


def size_text(num_bytes: int) -> str:
    if num_bytes >= 1 << 20:
        return f"{num_bytes >> 20} MB"
    return f"{num_bytes >> 10} KB" if num_bytes >= 1 << 10 else f"{num_bytes} B"


def time_text(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"


def summarise(runner: Runner, num_bytes: int) -> dict[str, Any] | None:
    """Return minimum and median of what was measured, or None."""
    times = runner.times.get(num_bytes)
    if not times:
        return None
    return {"min_s": min(times), "median_s": statistics.median(times), "samples": len(times)}


class Section:
    """One table: some contenders over some sizes. Prints itself and remembers what it printed."""

    def __init__(self, title: str, runners: Sequence[Runner]) -> None:
        self.title, self.runners = title, list(runners)
        self.rows: list[dict[str, Any]] = []
        print(f"\n{title}", flush=True)
        head = (
            f"{'size':>7}  {'contender':24} {'min':>10} {'median':>10} {'best GB/s':>9} {'GB/s':>7}"
        )
        print(f"{head}  {'x gloo':>14}  {'% of limit':>11}   (by minimum, by median)")

    def add(self, num_bytes: int) -> None:
        """Print and keep the lines for one size, once it has been measured."""
        found = {r.label: summarise(r, num_bytes) for r in self.runners}
        present = {label: s for label, s in found.items() if s is not None}
        gloo = present.get("gloo")
        limit = _best_of([s for label, s in present.items() if label.startswith("limit")])
        for label, summary in present.items():
            row = {"bytes": num_bytes, "contender": label, **summary}
            if gloo is not None:
                row["times_gloo"] = _ratios(gloo, summary)
            if limit is not None:
                row["share_of_limit"] = _ratios(limit, summary)
            self.rows.append(row)
            print(_line(row), flush=True)

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "rows": self.rows}


def _best_of(summaries: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    if not summaries:
        return None
    return {name: min(s[name] for s in summaries) for name in ("min_s", "median_s")}


def _ratios(reference: dict[str, Any], summary: dict[str, Any]) -> list[float]:
    return [reference[name] / summary[name] for name in ("min_s", "median_s")]


def _line(row: dict[str, Any]) -> str:
    num_bytes = row["bytes"]
    rates = [num_bytes / row[name] / 1e9 for name in ("min_s", "median_s")]
    text = f"{size_text(num_bytes):>7}  {row['contender']:24} {time_text(row['min_s']):>10}"
    text += f" {time_text(row['median_s']):>10} {rates[0]:9.2f} {rates[1]:7.2f}"
    gloo, limit = row.get("times_gloo"), row.get("share_of_limit")
    text += f"  {gloo[0]:6.1f}  {gloo[1]:6.1f}" if gloo else " " * 16
    return text + (f"  {limit[0]:5.0%} {limit[1]:5.0%}" if limit else "")


def machine() -> dict[str, Any]:
    """Return the machine and its load: figures are not valid for another machine or hour."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "idle_before": round(_idle_share(), 3),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _commit() -> str:
    command = ["git", "-C", str(_BENCH), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _idle_share() -> float:
    """Return the share of the last second in which the cores had nothing to do."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(text) for text in file.readline().split()[1:9]]
        return fields[3] + fields[4], sum(fields)

    (idle, total), _ = ticks(), time.sleep(1.0)
    idle_after, total_after = ticks()
    return (idle_after - idle) / max(1, total_after - total)


def write_json(name: str, content: dict[str, Any], folder: Path | None = None) -> Path:
    """Keep the figures, by default under bench/results/."""
    folder = folder or _BENCH / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
