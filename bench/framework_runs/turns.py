"""Contenders that train in turns: each is a set of workers that lives for the whole run."""

from __future__ import annotations

import os
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.contenders import rank_variables
from harness.ranks import Process, RankSet
from harness.rounds import Plan, Runner, interleave
from harness.session import Session

_FIRST_STEPS = 3  # uncounted: memory is mapped, graphs are compiled
Make = Callable[[Path], RankSet]


def one_thread(backend: str = "") -> dict[str, str]:
    """Return the environment in which a framework computes with one thread."""
    return {
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PACELINE_LOG_DIR": "none",
        **({"KERAS_BACKEND": backend} if backend else {}),
    }


def independent(
    name: str, kind: str, module: str, python: Path, env: Mapping[str, str], scratch: Path
) -> RankSet:
    """Start two processes that no launcher knows."""
    job = {"PACELINE_JOB": f"bench-{uuid.uuid4().hex}", **env}
    places = [
        Process([str(python)], {**rank_variables(rank, 2, scratch, name), **job})
        for rank in range(2)
    ]
    return RankSet(name, kind, 2, places, scratch, module=module)


def launched(
    name: str, kind: str, module: str, command: Sequence[str], env: Mapping[str, str], scratch: Path
) -> RankSet:
    """Start two workers by a launcher."""
    return RankSet(name, kind, 2, [Process(command, env)], scratch, module=module)


def paceline_run(python: Path, servers: int = 0) -> list[str]:
    """Return our launcher for two workers."""
    command = [str(python), "-m", "paceline", "run", "-n", "2"]
    return [*command, *(["-s", str(servers)] if servers else [])]


def compare(makers: Sequence[Make], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Train in turns; return the mean step of the slowest worker, in seconds, of each turn."""
    with Session() as session:
        sets = []
        for make in makers:  # one after the other: two cores
            ranks = session.start(make, session.scratch)
            sets += session.wait_until_ready([ranks]).values()
        runners = [Runner(ranks.name, _measure(ranks), ranks.version) for ranks in sets]
        interleave(runners, Plan(num_bytes=0, rounds=rounds, samples=steps))
    return {one.label: next(iter(one.times.values()), []) for one in runners if not one.has_failed}


def _measure(ranks: RankSet) -> Callable[[Plan, int], list[float]]:
    def measure(plan: Plan, _: int) -> list[float]:
        warmup = plan.warmup if plan.samples else _FIRST_STEPS
        request = {"op": "train", "warmup": warmup, "steps": plan.samples}
        spans = [answer["spans"] for answer in ranks.ask(request)]
        if not plan.samples:
            return []
        return [max((one[-1][1] - one[0][0]) / plan.samples for one in spans)]

    return measure


def ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> str:
    """Return how long one takes against another, by median and by minimum; "?" if one failed."""
    if not times.get(one) or not times.get(other):
        return "?"
    found: list[Any] = [pick(times[one]) / pick(times[other]) for pick in (statistics.median, min)]
    return "{:.3f} ({:.3f})".format(*found)


def describe(times: Mapping[str, Sequence[float]]) -> str:
    """Return the milliseconds of all contenders, by median and by minimum."""
    return ", ".join(
        f"{name} {statistics.median(found) * 1e3:.0f} ({min(found) * 1e3:.0f}) ms"
        for name, found in times.items()
        if found
    )


def rank_and_world() -> tuple[int, int]:
    """Return this worker's place, under any launcher."""
    names = ("RANK", "HOROVOD_RANK"), ("WORLD_SIZE", "HOROVOD_SIZE")
    rank, world = (next(os.environ[n] for n in pair if n in os.environ) for pair in names)
    return int(rank), int(world)
