"""Very many kills of servers: nothing that was acknowledged is lost, nothing counts twice.

    KILLS=1000 python -m pytest -m slow -s tests/fault/test_many_kills.py

prints how long counting stood still, by kill.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

import pytest
from test_ps_failover import WORKERS, Counting, policy

from support.elastic import elastic_job

KILLS = int(os.environ.get("KILLS", "40"))
PER_JOB = 20


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.parametrize("pace", ["async", "ps", "ssp"])
def test_very_many_kills(pace: str, tmp_path: Path) -> None:
    resumed_s: list[float] = []
    for number in range(-(-KILLS // PER_JOB)):
        kill_some(pace, number, tmp_path / f"books {number}", resumed_s)
    resumed_s.sort()
    p99 = resumed_s[min(len(resumed_s) - 1, len(resumed_s) * 99 // 100)]
    print(
        f"\n{pace}: {len(resumed_s)} kills, next update of all workers after"
        f" p50 {statistics.median(resumed_s):.3f} s, p99 {p99:.3f} s, most {resumed_s[-1]:.3f} s"
    )


def kill_some(pace: str, seed: int, path: Path, resumed_s: list[float]) -> None:
    """Kill servers of one job, any of them, at any instant; check the books at its end."""
    chance = random.Random(f"{pace} {seed}")
    with elastic_job(policy()) as job:
        counting = Counting(job, path, pace)
        servers = {0: WORKERS, 1: WORKERS + 1}
        for _ in range(PER_JOB):
            time.sleep(chance.uniform(0, 0.05))
            victim = chance.choice([0, 1])
            job.ranks.kill(servers[victim])
            resumed_s.append(counting.progress(2))  # the first may have been on its way
            servers[victim] = job.add("server", victim)
            counting.wait_for_copies(2)
        counting.finish()
