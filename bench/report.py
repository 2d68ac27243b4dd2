"""How long `paceline report` takes for a long run, and how large its page is.

    python bench/report.py                          # 10,000 steps, 8 workers, 2 servers
    python bench/report.py --workers 512 --steps 200
    python bench/report.py --keep DIR               # leave the run there, to look at its page

The run is made up, from a seed: a loss that falls, a worker whose input is slow for a while, a
worker that is lost and replaced, servers that get busier. The command is timed as a user runs it,
from the start of the process to its end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.observe.telemetry.events import (
    EpochEnded,
    MemberJoined,
    MemberLost,
    Note,
    ProgressReport,
    Recorded,
    Resumed,
    RunEnded,
    RunStarted,
    ServerLoad,
)
from paceline.observe.telemetry.file_formats import encode_event
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes

BATCH = 64
CLOCK_S = 5000.0  # the job's clock when the run began
Timed = tuple[float, Recorded]


def made_up_run(*, steps: int, workers: int, servers: int, seed: int) -> list[Timed]:
    """Return the events of a run in the order of their times."""
    rng = random.Random(seed)
    events: list[Timed] = [*_training(steps, workers, rng)]
    end_s = max(t for t, _ in events)
    events += _changes(end_s, steps, workers)
    if servers:
        events += _loads(end_s, servers, rng)
        events += _tables(end_s, steps, workers, servers, rng)
    events.sort(key=lambda one: one[0])
    pace = "ssp:3" if servers else "allreduce"
    started = RunStarted(
        "20261117-071204-train-3f2a",
        "2026-11-17T07:12:04Z",
        f"paceline run -n {workers} -s {servers} --pace {pace} train.py --epochs 4 --lr 0.1",
        "train.py",
        workers,
        servers,
        pace=pace,
        host="node-1",
        version="0.1.0",
        clock_s=CLOCK_S,
    )
    ended = RunEnded(0, end_s + 1.2, "all workers finished")
    return [(0.0, started), *events, (end_s + 1.2, ended)]


def _training(steps: int, workers: int, rng: random.Random) -> Iterator[Timed]:
    """Steps in lockstep: each takes as long as its slowest worker needs."""
    pending: list[list[StepTimes]] = [[] for _ in range(workers)]
    now_s = 3.0
    for step in range(1, steps + 1):
        # Worker 2 reads from a slow disk in the middle of the run; the last one always computes
        # a little longer than the other workers.
        local = []
        for worker in range(workers):
            input_s = rng.uniform(0.0005, 0.002)
            if worker == 2 and 0.3 < step / steps < 0.55:
                input_s += rng.uniform(0.01, 0.03)
            compute_s = rng.gauss(0.021, 0.001) * (1.25 if worker == workers - 1 else 1.0)
            local.append((input_s, max(compute_s, 0.01)))
        took_s = max(a + b for a, b in local) + rng.uniform(0.001, 0.003)
        now_s += took_s
        for worker, (input_s, compute_s) in enumerate(local):
            end_s = CLOCK_S + now_s + rng.uniform(0, 2e-4)
            wait_s = took_s - input_s - compute_s
            pending[worker].append(StepTimes(step, end_s, took_s, input_s, wait_s, BATCH))
            if len(pending[worker]) >= rng.randint(1, 10) or step == steps:
                values = _values(step, steps, worker, rng)
                reported = ProgressReport(worker, step, values, 0.0, steps=tuple(pending[worker]))
                yield now_s, reported
                pending[worker] = []


def _values(step: int, steps: int, worker: int, rng: random.Random) -> dict[str, float]:
    share = step / steps
    noise = rng.gauss(0, 0.05 + 0.05 * math.exp(-6 * share))
    loss = 0.35 + 1.95 * math.exp(-5 * share) + 0.02 * worker / 8 + noise
    lr = 0.1 * min(1.0, share / 0.05) * 0.5 * (1 + math.cos(math.pi * share))
    values = {"loss": max(loss, 0.01), "lr": lr, "compute %": 80.0, "comm %": 15.0}
    if step % 50 < 5:
        values["accuracy"] = 1 - 0.9 * math.exp(-4 * share) + rng.gauss(0, 0.01)
    return values


def _changes(end_s: float, steps: int, workers: int) -> Iterator[Timed]:
    for epoch in range(4):
        samples = steps * BATCH * workers // 4
        yield (
            end_s * (epoch + 1) / 4,
            EpochEnded(0, "loader 0", epoch, samples, reissued=64 * epoch),
        )
    if workers > 3:
        lost = MemberLost("worker", 3, 3, "node-1:4711", "killed by signal 9 (SIGKILL)", 2)
        yield end_s * 0.62, lost
        yield end_s * 0.62 + 0.4, Resumed(0, int(steps * 0.62), workers - 1, (3,), 0.31, True)
        yield end_s * 0.66, MemberJoined("worker", 3, 3, "node-1:5022", 3)
    yield end_s * 0.4, Note(1, "rank 1 has waited 2 s for rank 2 in all_reduce of bucket 3")


def _loads(end_s: float, servers: int, rng: random.Random) -> Iterator[Timed]:
    for second in range(1, int(end_s)):
        for server in range(servers):
            share = second / end_s
            busy = min(0.3 + 0.4 * share + rng.uniform(-0.08, 0.08), 1.0)
            queued = max(0, round(rng.gauss(1 + 5 * share, 1.2)))
            yield second, ServerLoad(90 + server, server, 900 * busy, 6e7 * busy, busy, queued)


def _tables(
    end_s: float, steps: int, workers: int, servers: int, rng: random.Random
) -> Iterator[Timed]:
    for server in range(servers):
        reports = []
        for worker in range(workers):
            usual = 2.0 + 3 * worker / workers
            ages: dict[int, int] = {}
            for _ in range(min(steps, 2000)):
                age = max(0, round(rng.gauss(usual, 1.4)))
                ages[age] = ages.get(age, 0) + 1
            slow = {workers - 1: 0.008 * steps, 2: 0.004 * steps}
            waited = {
                other: s * rng.uniform(0.6, 1) for other, s in slow.items() if other != worker
            }
            reports.append(WorkerReport(worker, steps, ages, waited))
        yield end_s, TableReport("model", server, steps * workers, tuple(reports))


def write_run(directory: Path, events: list[Timed]) -> None:
    """Write the files of a run."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "events.jsonl", "wb") as file:
        for t, event in events:
            file.write(encode_event(t, event))
    started = events[0][1]
    assert isinstance(started, RunStarted)
    settings = {
        "workers": (started.workers, "command line"),
        "pace": (started.pace, "command line"),
        "precision": ("bf16", "environment PACELINE_PRECISION"),
        "timeout_s": (30.0, "default"),
        "python_version": ("3.12.3", "found"),
        "torch_version": ("2.13.0", "found"),
    }
    reported = {
        name: {"value": value, "origin": origin} for name, (value, origin) in settings.items()
    }
    (directory / "config.json").write_text(json.dumps(reported))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-report-") as temporary:
        directory = options.keep or Path(temporary) / "run"
        events = made_up_run(
            steps=options.steps, workers=options.workers, servers=options.servers, seed=options.seed
        )
        write_run(directory, events)
        size = (directory / "events.jsonl").stat().st_size
        print(f"{options.steps:,} steps, {options.workers} workers: {len(events):,} events,")
        print(f"events.jsonl has {size / 1e6:.1f} MB")
        taken = []
        for _ in range(options.rounds):
            start_s = time.perf_counter()
            command = [sys.executable, "-m", "paceline", "report", str(directory)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            taken.append(time.perf_counter() - start_s)
        page = (directory / "report.html").stat().st_size
        print(f"report: {min(taken):.2f} s at best, {max(taken):.2f} s at worst of {len(taken)}")
        print(f"page:   {page / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
