"""Servers are killed, stopped and replaced while workers count: what was acknowledged is there,
once, and counting goes on.

Every client adds 1 to all cells of its own stripe, and in a second table 1 to one cell for each
update (oracle O1). The books about what was issued and acknowledged lie in a file.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ps_tables import Books, remote_table, wait_for

from paceline.comm.group import Group
from paceline.control.member import Membership
from paceline.control.membership.policy import Policy
from paceline.ps.spec import Rule
from support import report
from support.elastic import ElasticJob, elastic_job

SLOW = pytest.mark.slow
WORKERS = 2
STRIPE = 70_000  # elements: cut over several partitions
SEQUENCE = 20_000
# For some updates in which a server is lost: a second or so, and room for a busy machine; less
# than it takes until a silent one counts as lost.
PAUSE_S = 15.0
RULES = {
    "async": Rule(bound=None),
    "ssp": Rule(bound=2),
    "ps": Rule(bound=0, aggregate=True),
}


def count(group: Group, path: str, pace: str) -> dict[str, object]:
    """Count until the test ends it; return both tables as they are then."""
    books, me, rule = Books(path), group.rank, RULES[pace]
    counters = remote_table("counters", STRIPE * WORKERS, rule)
    sequence = remote_table("sequence", SEQUENCE * WORKERS, rule)
    share = float(WORKERS if rule.aggregate else 1)  # lockstep applies the mean
    mine, ones = slice(me * STRIPE, (me + 1) * STRIPE), sequence.items[0].grads
    counters.items[0].grads[mine] = -share
    report("counting")
    slowest_s = 0.0
    while not _is_enough(books, me):
        cell = me * SEQUENCE + books.issued(me)
        ones[cell] = -share
        began_s = time.monotonic()
        with books.update(me):
            for table in (counters, sequence):
                table.push(0).wait()
            for work in [table.commit(None) for table in (counters, sequence)]:
                work.wait()
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        ones[cell] = 0.0
        assert counters.items[0].params[mine].min() >= books.acked(me), "it does not see its own"
    books.rows[me, Books.DONE] = 1
    wait_for(lambda: all(books.rows[:WORKERS, Books.DONE]))
    for table in (counters, sequence):
        table.pull().wait()
    found = [table.items[0].params.clone() for table in (counters, sequence)]
    group.barrier()
    return {"counters": found[0], "sequence": found[1], "slowest_s": slowest_s}


def _is_enough(books: Books, me: int) -> bool:
    """All make the same number of updates, which in lockstep they must: the test says how many."""
    limit = int(books.rows[-1, Books.ACKED])
    return bool(limit) and books.acked(me) >= limit or books.issued(me) >= SEQUENCE


def end(books: Books) -> None:
    """Let everybody stop, a little later: nobody is as far as that when it is written down."""
    books.rows[-1, Books.ACKED] = max(books.acked(worker) for worker in range(WORKERS)) + 100


def require_exact(books: Books, found: dict[str, torch.Tensor]) -> None:
    sequence = found["sequence"]
    assert set(sequence.unique().tolist()) <= {0.0, 1.0}
    for client, cells in enumerate(found["counters"].chunk(WORKERS)):
        assert cells.min() >= books.acked(client), f"client {client}: an acknowledged one is lost"
        assert cells.max() <= books.issued(client), f"client {client}: one was applied twice"
        assert cells.min() == cells.max()
        flags = sequence[client * SEQUENCE :][:SEQUENCE]
        assert flags[: books.acked(client)].all(), f"client {client}: an acknowledged one is lost"
        assert not flags[books.issued(client) :].any()


def policy(servers: int = 2, replicas: int = 2, partitions: int = 2, **changes) -> Policy:
    return Policy(
        num_workers=WORKERS,
        is_elastic=True,
        num_servers=servers,
        replicas=replicas,
        num_partitions=partitions,
        **changes,
    )


class Counting:
    """Workers that count, and the test's hand on them."""

    def __init__(self, job: ElasticJob, path: Path, pace: str, hosts: Sequence[int] = ()) -> None:
        job.hosts = hosts
        self.job, self.books = job, Books(path, WORKERS)
        job.start(count, str(path), pace)
        for worker in range(WORKERS):
            job.ranks.receive(worker)

    def progress(self, updates: int = 5, timeout_s: float = 60.0) -> float:
        """Wait until every worker has so many more updates; return how long that took."""
        began_s = time.monotonic()
        before = [self.books.acked(worker) for worker in range(WORKERS)]
        wait_for(
            lambda: all(self.books.acked(w) >= before[w] + updates for w in range(WORKERS)),
            timeout_s,
        )
        return time.monotonic() - began_s

    def finish(self, timeout_s: float = 60.0) -> list[dict[str, object]]:
        """Let the workers end, and check their books."""
        end(self.books)
        outcomes = self.job.ranks.wait(timeout_s, ranks=range(WORKERS))
        values = [outcome.value for outcome in outcomes]
        assert all(value is not None for value in values), "\n".join(map(str, outcomes))
        for value in values:
            require_exact(self.books, value)
        return values

    @property
    def membership(self) -> Membership:
        membership = self.job.operator.status().membership
        assert membership is not None
        return membership

    def wait_for_copies(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until every partition has so many complete copies."""

        def are_there() -> bool:
            now = self.membership
            return all(len(holders) == count for holders in now.partitions)

        wait_for(are_there, timeout_s)


@pytest.mark.parametrize("pace", ["ps", *(pytest.param(p, marks=SLOW) for p in ("async", "ssp"))])
def test_a_backup_takes_over_and_a_new_one_is_filled(pace: str, tmp_path: Path) -> None:
    with elastic_job(policy()) as job:
        counting = Counting(job, tmp_path / "books", pace)
        counting.progress()
        job.ranks.kill(WORKERS)  # primary of one partition, backup of the other
        assert counting.progress() < PAUSE_S
        assert counting.membership.partitions == ((WORKERS + 1,), (WORKERS + 1,))
        new = job.add("server", 0)
        counting.wait_for_copies(2)
        counting.progress()
        job.ranks.kill(WORKERS + 1)  # the old backup: the new one has everything
        assert counting.progress() < PAUSE_S
        values = counting.finish()
        (last,) = job.ranks.wait(60, ranks=[new])
        assert last.status == 0, str(last)
        assert max(value["slowest_s"] for value in values) < PAUSE_S


@pytest.mark.parametrize("pace", ["async", pytest.param("ps", marks=SLOW)])
def test_a_stopped_primary_is_fenced(pace: str, tmp_path: Path) -> None:
    """It counts as lost, and is ended before others go on without it."""
    with elastic_job(policy(lease_s=5.0)) as job:
        counting = Counting(job, tmp_path / "books", pace)
        counting.progress()
        job.ranks.kill(WORKERS, signal.SIGSTOP)
        assert counting.progress() < 5.0 + PAUSE_S
        (stopped,) = job.ranks.wait(60, ranks=[WORKERS])
        assert stopped.status == -signal.SIGKILL  # it shares memory with the others of its host
        counting.finish()


def test_servers_are_added_and_removed_while_counting(tmp_path: Path) -> None:
    """A partition is filled elsewhere, handed over and dropped; nobody stops."""
    with elastic_job(policy(servers=1, replicas=1, partitions=4)) as job:
        counting = Counting(job, tmp_path / "books", "ssp")
        first = WORKERS
        counting.progress()
        job.operator.servers_add(1)
        second = job.add("server", 1)

        def holders() -> list[int]:
            return sorted(rank for ranks in counting.membership.partitions for rank in ranks)

        wait_for(lambda: holders() == [first, first, second, second])
        counting.progress()
        job.operator.servers_remove([0])
        wait_for(lambda: holders() == [second] * 4)
        counting.progress()
        (removed,) = job.ranks.wait(60, ranks=[first])
        assert removed.status == 0, str(removed)
        values = counting.finish()
        assert max(value["slowest_s"] for value in values) < PAUSE_S


def test_a_backup_that_is_killed_holds_up_nobody(tmp_path: Path) -> None:
    with elastic_job(policy(servers=3, partitions=1, replicas=3)) as job:
        counting = Counting(job, tmp_path / "books", "async")
        counting.progress()
        job.ranks.kill(WORKERS + 1)  # between the primary and the last one
        assert counting.progress() < PAUSE_S
        job.ranks.kill(WORKERS)
        assert counting.progress() < PAUSE_S
        assert counting.membership.partitions == ((WORKERS + 2,),)
        counting.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pace", RULES)
def test_servers_are_killed_at_random_instants(seed: int, pace: str, tmp_path: Path) -> None:
    """Each is replaced; when its successor has everything the next one is killed."""
    chosen = random.Random(seed)
    with elastic_job(policy()) as job:
        counting = Counting(job, tmp_path / "books", pace)
        servers = {0: WORKERS, 1: WORKERS + 1}
        for _ in range(4):
            counting.progress(chosen.randrange(1, 4))
            time.sleep(chosen.uniform(0, 0.02))
            victim = chosen.choice([0, 1])
            job.ranks.kill(servers[victim])
            servers[victim] = job.add("server", victim)
            counting.wait_for_copies(2)
        counting.finish()


HOSTS = {  # of the workers, the servers, and the new server
    "servers elsewhere": [0, 0, 1, 2, 1],
    "each worker beside a server": [0, 1, 0, 1, 0],
    "workers on two hosts": [0, 1, 0, 0, 1],
}


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("pace", ["async", "ps"])
@pytest.mark.slow
def test_copies_on_several_hosts(pace: str, hosts: list[int], tmp_path: Path) -> None:
    """Tensors are sent where a server does not see them; a new primary may be anywhere."""
    with elastic_job(policy()) as job:
        counting = Counting(job, tmp_path / "books", pace, hosts)
        counting.progress()
        job.ranks.kill(WORKERS)
        assert counting.progress() < PAUSE_S
        job.add("server", 0)
        counting.wait_for_copies(2)
        counting.progress()
        job.ranks.kill(WORKERS + 1)
        assert counting.progress() < PAUSE_S
        counting.finish()


def kill_at_call(pid: int, number: int) -> None:
    """Kill a process at the beginning of a thread's n-th system call from now on."""
    subprocess.run(
        ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid)]
        + ["-e", "trace=all", "-e", f"inject=all:signal=SIGKILL:when={number}"],
        check=False,  # it ends as its victim does
        timeout=30,
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("pace", ["ps", "async"])
@pytest.mark.parametrize("first", [1, 6, 11])
def test_the_primary_is_killed_at_every_system_call(pace: str, first: int, tmp_path: Path) -> None:
    """A turn of its loop has a few: what it has applied, sent on or answered by then differs."""
    with elastic_job(policy(partitions=1)) as job:
        counting = Counting(job, tmp_path / "books", pace)
        for number in range(first, first + 5):
            counting.progress(2)
            ((primary, _),) = counting.membership.partitions
            server = counting.membership.member(primary)
            kill_at_call(server.pid, number)
            counting.progress(2)
            job.add("server", server.number)
            counting.wait_for_copies(2)
        counting.finish()
