"""The neutral client while servers are lost: it goes on with whoever takes over.

Every worker adds 1 to its own cells, again and again, from one thread, and follows and reads from
others. Nothing acknowledged is lost, nothing is applied twice, and readers notice a delay at most.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ps_tables import Books, wait_for

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from support import report
from support.elastic import elastic_job

WORKERS = 2
LARGE = 200_000  # elements: cut over all partitions
RULES = {"async": "async", "ssp": "ssp:2", "ps": "ps"}


def policy(**changes: object) -> Policy:
    return Policy(
        num_workers=WORKERS,
        num_servers=2,
        is_elastic=True,
        **{"replicas": 2, "num_partitions": 4, "min_workers": 1, **changes},
    )


def count(group: Group, path: str, pace: str) -> dict[str, object]:
    """Count until the test ends it; return the values, and what was read meanwhile."""
    books, me = Books(path), group.rank
    client = pl.ps.Client(pace)
    client.init("cells", np.zeros(WORKERS), lr=1.0)
    client.init("large", np.zeros(LARGE), lr=1.0)
    share = float(WORKERS if pace == "ps" else 1)  # lockstep applies the mean
    one, many = np.zeros(WORKERS), np.zeros(LARGE)
    one[me], many[me::WORKERS] = -share, -share
    versions, seen, stop = list[int](), list[float](), threading.Event()

    def follow() -> None:
        for version in client.subscribe("cells"):
            versions.append(version)
            if stop.is_set():
                return

    def look() -> None:
        while not stop.is_set():
            seen.append(float(client.peek("large").wait()[me]))

    threads = [threading.Thread(target=target) for target in (follow, look)]
    for thread in threads:
        thread.start()
    report("counting")
    limit = 0
    while not limit or books.issued(me) < limit:
        with books.update(me):
            works = [client.push("cells", one), client.push_pull("large", many)]
            for work in works:
                work.wait()
        limit = int(books.rows[-1, Books.ACKED])
    stop.set()
    books.rows[me, Books.DONE] = 1
    wait_for(lambda: all(books.rows[:WORKERS, Books.DONE]))
    if me == 0 or pace == "ps":
        client.push("cells", np.zeros(WORKERS)).wait()  # wakes whoever follows
    for thread in threads:
        thread.join()
    found = {"cells": client.peek("cells").wait(), "large": client.peek("large").wait()}
    assert sorted(client.keys()) == ["cells", "large"]
    group.barrier()
    return {**found, "versions": versions, "seen": seen}


def run(path: Path, pace: str, losses: int, seed: int) -> None:
    chosen, books = random.Random(seed), Books(path, WORKERS)
    servers = [WORKERS, WORKERS + 1]
    with elastic_job(policy()) as job:
        job.start(count, str(path), RULES[pace])
        for worker in range(WORKERS):
            job.ranks.receive(worker)
        for _ in range(losses):
            before = books.acked(0)
            wait_for(lambda b=before: books.acked(0) > b + 5, 60)
            time.sleep(chosen.random() * 0.05)
            number = chosen.randrange(2)
            job.ranks.kill(servers[number])
            servers[number] = job.add("server", number)
            wait_for(lambda: _has_copies(job), 60)
        before = books.acked(0)
        wait_for(lambda: books.acked(0) > before + 5, 60)
        books.rows[-1, Books.ACKED] = max(books.issued(worker) for worker in range(WORKERS)) + 50
        outcomes = job.ranks.wait(60, range(WORKERS))
    assert all(o.error is None and o.status == 0 for o in outcomes), "\n".join(map(str, outcomes))
    for outcome in outcomes:
        require_exact(books, outcome.value)


def _has_copies(job) -> bool:
    membership = job.operator.status().membership
    return all(len(held) == 2 for held in membership.partitions)


def require_exact(books: Books, found: dict[str, object]) -> None:
    for worker in range(WORKERS):
        acked, issued = books.acked(worker), books.issued(worker)
        assert acked == issued
        assert found["cells"][worker] == acked
        assert np.all(found["large"][worker::WORKERS] == acked)
    assert found["versions"] == sorted(set(found["versions"]))
    assert found["seen"] == sorted(found["seen"])  # what a worker has pushed does not go away


@pytest.mark.parametrize(
    "pace", ["async", *(pytest.param(pace, marks=pytest.mark.slow) for pace in ("ssp", "ps"))]
)
def test_a_client_goes_on_when_a_server_is_lost(tmp_path: Path, pace: str) -> None:
    run(tmp_path / "books", pace, losses=1, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pace", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_client_goes_on_after_many_losses(tmp_path: Path, pace: str, seed: int) -> None:
    run(tmp_path / "books", pace, losses=8, seed=seed)
