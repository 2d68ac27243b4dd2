"""Train a network with two workers and in one process, and compare. `make demo` runs this.

Both trainings are `paceline run` of train.py in this directory, with the same global batch, the
same samples in the same order and one thread per process. The single process runs plain PyTorch.
Samples per second are compared, without the first steps, which warm up caches and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
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
    """The result of one training."""

    workers: int
    threads: int
    batch: int
    accuracy: float
    update: str
    steps_s: list[float]  # duration of each counted step

    @property
    def samples_per_s(self) -> float:
        return self.batch * len(self.steps_s) / sum(self.steps_s)


def run(workers: int, steps: int, directory: Path, console: Console) -> Result:
    """Train with this many workers and the launcher's display; raise SystemExit on failure."""
    name = "plain PyTorch in 1 process" if workers == 1 else f"{workers} workers"
    console.print()
    console.rule(f"[bold]{steps} steps with {name}", align="left", style="dim")
    written, logs = directory / f"{workers}.json", directory / f"workers-{workers}"
    options = ["-n", str(workers), "--threads-per-worker", "1", "--log-dir", str(logs)]
    script = [str(TRAIN), "--steps", str(steps), "--result", str(written)]
    plain = ["--plain"] if workers == 1 else []
    code = subprocess.call([sys.executable, "-m", "paceline", "run", *options, *script, *plain])
    if code != 0:
        raise SystemExit(code)
    found = json.loads(written.read_text())
    # distribute logs which update it has chosen.
    said = re.search(r"\bupdate (\w+)", (logs / "rank-0.log").read_text())
    steps_s = [end - start for start, end in pairwise(found.pop("finished_s"))]
    return Result(**found, update=said[1] if said else "plain", steps_s=steps_s[steps // 10 :])


def table(one: Result, many: Result) -> Table:
    """Return a table that compares both trainings."""
    grid = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for result in (one, many):
        title = f"{result.workers} workers" if result is many else "1 process"
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


def used_by_others_s() -> float:
    """Return the CPU time that other programs on this machine have used so far."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    del ticks[3:5]  # idle, and waiting for disks
    return sum(ticks) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    if options.steps < 10:
        parser.error(f"--steps {options.steps}: at least 10, of which the first ones warm up")
    signal.signal(signal.SIGINT, lambda *_: None)  # the launcher receives Ctrl-C too, and exits
    console, began_s, others_s = Console(highlight=False), time.monotonic(), used_by_others_s()
    directory = Path("runs") / time.strftime("demo-%m%d-%H%M%S")  # kept for `paceline report`
    directory.mkdir(parents=True)
    many = run(MANY, options.steps, directory, console)
    one = run(1, options.steps, directory, console)
    console.print()
    console.rule("[bold]side by side", align="left", style="dim")
    console.print(table(one, many))
    console.print(
        f"Same network, same batches of {one.batch} samples, {one.threads} thread per process.\n"
        f"Speeds over the last {len(one.steps_s)} steps; efficiency: speed-up / {many.workers}.",
        style="dim",
    )
    free = os.cpu_count() - (used_by_others_s() - others_s) / (time.monotonic() - began_s)
    if free < MANY - 0.1:
        console.print(f"[yellow]Only {free:.1f} cores were free: no fair test of {MANY} workers.")


if __name__ == "__main__":
    main()
