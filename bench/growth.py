"""How a training job grows: step time, memory, sockets and coordinator for 2 to 16 processes.

    python bench/growth.py                     # and docs/images/growth.svg with --plot
    python bench/growth.py --workers 2 4 --steps 3 --rounds 1

Jobs of one host, AdamW, one thread for each worker, in turns. Beside the measured step stands what
`paceline simulate` predicts from the step of one process alone: so many workers on one host with
the cores of this machine. The coordinator runs in the launcher, whose processor time is given for a
step and in all. bench/README.md says more.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crowd_runs.watch import Observed, run_observed
from harness.report import machine, write_json
from models import TASKS

from paceline.observe.report.family_plot import family_plot

_TRAIN = Path(__file__).parent / "crowd_runs" / "train.py"
_TIMEOUT_S = 240.0
_GAP = 24  # between two plots


def run_once(workers: int, options: argparse.Namespace) -> dict[str, float]:
    """Run one job and return its figures."""
    job = run_observed(workers, [str(_TRAIN), options.model, str(options.steps)], _TIMEOUT_S)
    reports = job.reports
    assert len(reports) == workers, reports
    steps_s = [max(times) for times in zip(*(one["steps_s"] for one in reports), strict=True)]
    return {
        "step_s": statistics.median(steps_s),
        "best_step_s": min(steps_s),
        "pss_mb": statistics.fmean(one["pss_kb"] for one in reports) / 1024,
        "shared_mb": sum(one["shared_kb"] for one in reports) / 1024,
        "total_mb": sum(one["pss_kb"] for one in reports) / 1024,
        "sockets": max(one["sockets"] for one in reports),
        "fds": max(one["fds"] for one in reports),
        "launcher_s": job.launcher_s,
        "launcher_ms_per_step": _while_training(job, sum(steps_s)) / len(steps_s) * 1e3,
    }


def _while_training(job: Observed, seconds: float) -> float:
    """Return the launcher's processor seconds during the counted steps."""
    end_s = max(one["told_s"] for one in job.reports)
    return job.watch.idle_share(end_s - seconds, end_s) * seconds


def simulated(workers: Sequence[int], one: Mapping[str, float], model: str) -> dict[int, float]:
    """Return the step times that `paceline simulate` predicts from those of one process alone."""
    task = TASKS[model]
    num_bytes = 4 * sum(parameter.numel() for parameter in task.model().parameters())
    profile = {"parameters_bytes": num_bytes, "compute_s": one["step_s"], "batch": task.batch}
    found = {}
    with tempfile.TemporaryDirectory(prefix="paceline-growth-") as directory:
        path, table = Path(directory) / "model.json", Path(directory) / "table.csv"
        path.write_text(json.dumps(profile))
        for count in workers:
            hosts = ["-n", str(count), "--per-host", str(count), "--cores", str(os.cpu_count())]
            command = [sys.executable, "-m", "paceline", "simulate", *hosts]
            paces = ["--paces", "allreduce", "-o", str(table), str(path)]
            subprocess.run([*command, *paces], check=True, capture_output=True)
            (row,) = csv.DictReader(table.open())
            found[count] = float(row["step_s"])
    return found


def plot(rows: Mapping[int, Mapping[str, float]], predicted: Mapping[int, float]) -> str:
    """Return an SVG file of four plots."""
    counts = [count for count in rows if count > 1]

    def points(name: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(count, rows[count][name] * factor) for count in counts]

    x_label = "processes"
    plots = [
        family_plot(
            {
                "measured": points("step_s", 1e3),
                "simulated": [(count, predicted[count] * 1e3) for count in counts],
            },
            title="Step",
            x_label=x_label,
            y_label="ms, median",
            is_log_y=True,
        ),
        family_plot(
            {"of a process": points("pss_mb"), "shared by all": points("shared_mb")},
            title="Memory (PSS)",
            x_label=x_label,
            y_label="MB",
        ),
        family_plot(
            {"sockets": points("sockets"), "descriptors": points("fds")},
            title="Connections of a process",
            x_label=x_label,
            y_label="number",
        ),
        family_plot(
            {"launcher": points("launcher_ms_per_step")},
            title="Launcher and coordinator",
            x_label=x_label,
            y_label="ms of processor time for a step",
        ),
    ]
    return side_by_side(plots)


def side_by_side(plots: Sequence[str]) -> str:
    """Return an SVG file with these plots in two columns."""
    width, height = 760, 400  # of each, as family_plot draws them
    inside = []
    for number, one in enumerate(plots):
        x, y = number % 2 * (width + _GAP), number // 2 * (height + _GAP)
        inside.append(one.replace("<svg ", f'<svg x="{x}" y="{y}" ', 1))
    size = (2 * width + _GAP, (len(plots) + 1) // 2 * (height + _GAP) - _GAP)
    box = f'viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', *inside, "</svg>\n"])


def show(rows: Mapping[int, Mapping[str, float]], predicted: Mapping[int, float]) -> None:
    print(
        f"{'processes':>9} {'step, best':>11} {'median':>9} {'simulated':>10} {'PSS each':>9}"
        f" {'all':>8} {'shared':>8} {'sockets':>8} {'fds':>5} {'launcher/step':>14}"
    )
    for count, row in rows.items():
        best_ms, step_ms = row["best_step_s"] * 1e3, row["step_s"] * 1e3
        guess = f"{predicted[count] * 1e3:7.0f} ms" if count in predicted else ""
        print(
            f"{count:9} {best_ms:8.0f} ms {step_ms:6.0f} ms {guess:>10}"
            f" {row['pss_mb']:6.0f} MB {row['total_mb']:5.0f} MB {row['shared_mb']:5.0f} MB"
            f" {row['sockets']:8.0f} {row['fds']:5.0f} {row['launcher_ms_per_step']:11.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--model", choices=list(TASKS), default="mlp")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--out", type=Path, help="folder for the results, not bench/results")
    options, facts = parser.parse_args(), machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    samples: dict[int, list[dict[str, float]]] = {count: [] for count in (1, *options.workers)}
    for _ in range(options.rounds):
        for count, found in samples.items():
            found.append(run_once(count, options))
            print(f"{count} processes: {found[-1]['step_s'] * 1e3:.0f} ms", flush=True)
    rows = {
        count: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for count, found in samples.items()
    }
    predicted = simulated(options.workers, rows[1], options.model)
    show(rows, predicted)
    content: dict[str, Any] = {"machine": facts, "rows": rows, "simulated": predicted}
    if options.plot is not None:
        options.plot.write_text(plot(rows, predicted))
        print(f"drawn: {options.plot}")
    print(f"written to {write_json('growth', content, options.out)}")


if __name__ == "__main__":
    main()
