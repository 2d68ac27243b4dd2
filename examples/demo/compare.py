"""Train a network with two workers and in one process, and compare: what `make demo` runs.

Both trainings are `paceline run` of train.py beside this file, with the same global batch, the same
samples in the same order and one thread for each process. The one process takes plain PyTorch's
steps. Compared are samples per second, without the first steps, which warm up caches and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).resolve().with_name("train.py")
MANY = 2


@dataclass(frozen=True)
class Result:
    """What one training showed."""

    workers: int
    threads: int
    batch: int
    accuracy: float
    update: str
    steps_s: list[float]  # how long each counted step took

    @property
    def samples_per_s(self) -> float:
        return self.batch * len(self.steps_s) / sum(self.steps_s)


def run(workers: int, steps: int, directory: Path, console: Console) -> Result:
    """Train with some workers, with the launcher's own display; SystemExit when that fails."""
    name = "plain PyTorch in 1 process" if workers == 1 else f"{workers} workers"
    console.rule(f"[bold]{steps} steps with {name}", align="left", style="dim")
    written, logs = directory / f"{workers}.json", directory / f"logs-{workers}"
    options = ["-n", str(workers), "--threads-per-worker", "1", "--log-dir", str(logs)]
    script = [str(TRAIN), "--steps", str(steps), "--result", str(written)]
    plain = ["--plain"] if workers == 1 else []
    code = subprocess.call([sys.executable, "-m", "paceline", "run", *options, *script, *plain])
    if code != 0:
        raise SystemExit(code)
    found = json.loads(written.read_text())
    # distribute says which update it has chosen.
    said = re.search(r"\bupdate (\w+)", (logs / "rank-0.log").read_text())
    steps_s = [end - start for start, end in pairwise(found.pop("finished_s"))]
    return Result(**found, update=said[1] if said else "plain", steps_s=steps_s[steps // 10 :])


def table(one: Result, many: Result) -> Table:
    """Put both trainings side by side."""
    grid = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for result in (one, many):
        title = "1 process" if result.workers == 1 else f"{result.workers} workers"
        grid.add_column(title, justify="right", style="green" if result is many else "")
    rows = {
        "samples/s": lambda r: f"{r.samples_per_s:,.0f}",
        "step, median": lambda r: f"{1000 * median(r.steps_s):.1f} ms",
        "test accuracy": lambda r: f"{100 * r.accuracy:.1f} %",
        "optimizer's update": lambda r: r.update,
    }
    for name, cell in rows.items():
        grid.add_row(name, cell(one), cell(many))
    grid.add_section()
    speed_up = many.samples_per_s / one.samples_per_s
    grid.add_row("speed-up", "1", f"[bold]{speed_up:.2f}")
    grid.add_row("efficiency", "100 %", f"[bold]{100 * speed_up / many.workers:.0f} %")
    return grid


def doubts(workers: int) -> str:
    """Say what would make the figures unfit to judge by, or nothing."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if cores < workers:
        return f"{workers} workers share {cores} core here: no speed-up can be expected."
    if load > 0.5:
        return f"Other programs kept this machine busy (load {load:.1f}): the figures say little."
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    if options.steps < 10:
        parser.error(f"--steps {options.steps}: at least 10, of which the first ones warm up")
    signal.signal(signal.SIGINT, lambda *_: None)  # the launcher hears Ctrl-C too, and ends
    console, doubt = Console(highlight=False), doubts(MANY)
    with tempfile.TemporaryDirectory() as directory:
        many = run(MANY, options.steps, Path(directory), console)
        one = run(1, options.steps, Path(directory), console)
    console.rule("[bold]side by side", align="left", style="dim")
    console.print(table(one, many))
    console.print(
        f"Same network, same batches of {one.batch} samples, {one.threads} thread per process.\n"
        f"Speeds over the last {len(one.steps_s)} steps; efficiency: speed-up / {many.workers}.",
        style="dim",
    )
    if doubt:
        console.print(doubt, style="yellow")


if __name__ == "__main__":
    main()
