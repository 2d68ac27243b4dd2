"""How long a job takes from the command to its first step, with one worker and with many.

    python bench/start_up.py                     # 1 and 8 workers, with and without the template
    python bench/start_up.py --workers 4 --servers 1 --rounds 9
    python bench/start_up.py --quick

A round runs every job once, and each round begins with another one. A job is a script that calls
`pl.init()`, or one that makes one step of a tiny model after it. Reported: the time from the start
of the command until the last worker is there, the smallest and the median over the rounds, and how
many times that of one worker it is; the processor time of the whole job, which other programs on
the machine disturb less; and the memory of all workers when they are there (PSS: a page that
several share counts once in all).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
_INIT = """
import paceline as pl
pl.init()
"""
_STEP = """
import torch
import paceline as pl
pl.init()
model = torch.nn.Linear(8, 8)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
"""
# All must be there before anyone leaves, and PSS counts those that are there at the same time.
_TOLD = """
import time
at_s = time.time()
pl.world().barrier()
with open("/proc/self/smaps_rollup") as file:
    pss = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
print("up", at_s, pss, flush=True)
pl.world().barrier()
"""
SCRIPTS = {"init": _INIT + _TOLD, "first step": _STEP + _TOLD}


@dataclass(frozen=True)
class Sample:
    """One job."""

    up_s: float
    busy_s: float
    memory_bytes: int


def run_once(script: Path, workers: int, options: list[str]) -> Sample:
    """Run one job; return when its last worker was there."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(workers), "--log-dir", "none"]
    before, started_s = _busy_s(), time.time()
    done = subprocess.run(
        [*command, *options, str(script)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr}")
    reported = [line.split("up ")[1].split() for line in done.stdout.splitlines() if "up " in line]
    assert len(reported) == workers, done.stdout
    return Sample(
        up_s=max(float(at_s) for at_s, _ in reported) - started_s,
        busy_s=_busy_s() - before,
        memory_bytes=1024 * sum(int(pss) for _, pss in reported),
    )


def _busy_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--quick", action="store_true", help="2 workers, init only, one round")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="for start_up.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.rounds, arguments.scripts = 2, 1, ["init"]
    served = ["-s", str(arguments.servers), "--pace", "ps"] if arguments.servers else []
    jobs = {
        f"{title}, {name}": (title, count, [*served, *options])
        for title in arguments.scripts
        for name, count, options in (
            ("1 worker", 1, []),
            (f"{arguments.workers} workers", arguments.workers, []),
            (f"{arguments.workers} workers, --no-template", arguments.workers, ["--no-template"]),
        )
    }
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    with tempfile.TemporaryDirectory(prefix="paceline-start-") as directory:
        paths = {title: Path(directory) / f"{title.split()[-1]}.py" for title in SCRIPTS}
        for title, path in paths.items():
            path.write_text(SCRIPTS[title])
        order = list(jobs)
        for _ in range(arguments.rounds):
            for name in order:
                title, count, options = jobs[name]
                samples[name].append(run_once(paths[title], count, options))
            order.append(order.pop(0))
    beside = {name: f"{title}, 1 worker" for name, (title, _, _) in jobs.items()}
    rows = report(samples, beside)
    arguments.out.mkdir(exist_ok=True)
    (arguments.out / "start_up.json").write_text(json.dumps(rows, indent=2) + "\n")


def report(samples: dict[str, list[Sample]], beside: dict[str, str]) -> dict[str, dict[str, float]]:
    """Print a table, and return it; `beside` names the job that each is compared with."""
    rows = {
        name: {
            "min_s": min(one.up_s for one in found),
            "median_s": statistics.median(one.up_s for one in found),
            "busy_s": statistics.median(one.busy_s for one in found),
            "memory_mb": statistics.median(one.memory_bytes for one in found) / 1e6,
        }
        for name, found in samples.items()
    }
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end")
    print(f"{'job':40} {'min':>8} {'median':>8}   x one worker   {'busy':>7} {'memory':>9}")
    for name, row in rows.items():
        one = rows[beside[name]]
        times = f"{row['min_s'] / one['min_s']:5.2f} {row['median_s'] / one['median_s']:5.2f}"
        print(
            f"{name:40} {row['min_s']:6.2f} s {row['median_s']:6.2f} s   {times:>12}"
            f"   {row['busy_s']:5.1f} s {row['memory_mb']:6.0f} MB"
        )
    return rows


if __name__ == "__main__":
    main()
