"""Jobs of very many sleeping processes on one machine: start, one all-reduce, stop.

    python bench/many_processes.py                       32, 128 and 256 workers
    python bench/many_processes.py --workers 32 64 --rounds 3
    python bench/many_processes.py --quick

Each job starts, forms its group, adds up one tensor, sleeps for some seconds and ends. Reported for
each size, by the best and the median job: from the command until the last worker has joined; the
all-reduce; the end; processor time of the whole job by process; connections, descriptors and memory
of one process (PSS and private), what the kernel keeps beside it, and the processor time of the
coordinator, which runs in the launcher, in all and while the workers sleep. A job is ended when
memory gets short. bench/README.md says more.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crowd_runs.watch import run_observed
from harness.report import machine, write_json

_WORKER = Path(__file__).parent / "crowd_runs" / "worker.py"


@dataclass
class Sample:
    """One job."""

    start_s: float  # from the command until the last worker had joined
    all_reduce_ms: float  # of the slowest worker that reports
    stop_s: float  # from the last worker's last line to the end of the command
    cpu_s: float  # of all processes of the job, by worker
    launcher_ms: float  # processor time of launcher and coordinator, by worker
    idle_us: float  # the same in a second of sleep, by worker
    fds: int
    sockets: int
    threads: int
    pss_mb: float
    private_mb: float
    kernel_mb: float  # of the whole machine beside what it kept before, by worker


def run_once(workers: int, sleep_s: float, timeout_s: float) -> Sample:
    """Run one job and return what it took."""
    job = run_observed(workers, [str(_WORKER), str(sleep_s)], timeout_s)
    found = job.reports
    barrier_s, told_s = (max(one[key] for one in found) for key in ("barrier_s", "told_s"))
    idle_s = job.watch.idle_share(barrier_s + 0.5, barrier_s + sleep_s)
    return Sample(
        start_s=barrier_s - job.started_s,
        all_reduce_ms=max(one["all_reduce_s"] for one in found) * 1e3,
        stop_s=job.ended_s - told_s,
        cpu_s=job.cpu_s / workers,
        launcher_ms=job.launcher_s / workers * 1e3,
        idle_us=idle_s / workers * 1e6,
        fds=max(one["fds"] for one in found),
        sockets=max(one["sockets"] for one in found),
        threads=max(one["threads"] for one in found),
        pss_mb=statistics.fmean(one["pss_kb"] for one in found) / 1024,
        private_mb=statistics.fmean(one["private_kb"] for one in found) / 1024,
        kernel_mb=job.kernel_kb / 1024 / workers,
    )


_COLUMNS = {
    "start_s": ("start", "s", 1),
    "all_reduce_ms": ("all-reduce", "ms", 1),
    "stop_s": ("stop", "s", 1),
    "cpu_s": ("cpu by process", "s", 2),
    "launcher_ms": ("of launcher", "ms", 1),
    "idle_us": ("asleep", "us/s", 0),
    "fds": ("descriptors", "", 0),
    "sockets": ("sockets", "", 0),
    "threads": ("threads", "", 0),
    "pss_mb": ("PSS", "MB", 1),
    "private_mb": ("private", "MB", 1),
    "kernel_mb": ("kernel", "MB", 2),
}


def show(samples: dict[int, list[Sample]]) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    rows = []
    print(f"{'workers':>8}" + "".join(f"{title:>18}" for title, _, _ in _COLUMNS.values()))
    for workers, found in samples.items():
        row: dict[str, Any] = {"workers": workers}
        text = f"{workers:8}"
        for name, (_, unit, digits) in _COLUMNS.items():
            values = [getattr(one, name) for one in found]
            best, median = min(values), statistics.median(values)
            row[name] = {"best": best, "median": median}
            text += f"{f'{best:.{digits}f} {median:.{digits}f} {unit}'.strip():>18}"
        rows.append(row)
        print(text, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[32, 128, 256])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=5.0, help="seconds")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one job")
    parser.add_argument("--out", type=Path, help="folder for the results, not bench/results")
    parser.add_argument("--quick", action="store_true", help="8 and 20 workers, asleep for 1 s")
    options = parser.parse_args()
    if options.quick:
        options.workers, options.sleep = [8, 20], 1.0
    facts = machine()
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    samples: dict[int, list[Sample]] = {workers: [] for workers in options.workers}
    for _ in range(options.rounds):
        for workers in options.workers:
            samples[workers].append(run_once(workers, options.sleep, options.timeout))
            print(f"{workers} workers: {samples[workers][-1]}", flush=True)
    print("\neach value: best and median of the jobs")
    rows = show(samples)
    content = {"machine": facts, "options": {**vars(options), "out": ""}, "rows": rows}
    print(f"written to {write_json('many-processes', content, options.out)}")


if __name__ == "__main__":
    main()
