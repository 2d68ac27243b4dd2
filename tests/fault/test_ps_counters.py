"""Workers are killed at random while they count on servers: nothing acknowledged is lost, nothing
is applied twice, and half an update is never applied.

Every client adds 1 to all cells of its own stripe, and in a second table 1 to one cell for each
update. Whatever happened, a stripe has one value on each server, between what was acknowledged and
what was issued, and the second table has only zeros and ones.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from ps_tables import Books, remote_table, wait_for

from paceline.comm.group import Group
from support import report, started

WORKERS = 3
SEQUENCE = 20_000  # updates that a client may make
PLACES = {  # of the workers, then of the servers
    "one host": [0, 0, 0, 0],
    "server elsewhere": [0, 0, 0, 1],
    "two servers": [0, 0, 1, 0, 1],
}


def count(group: Group, path: str, stripe: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count until the test ends it; return both tables as they are then."""
    books, me = Books(path), group.rank
    counters = remote_table("counters", stripe * group.size)
    sequence = remote_table("sequence", SEQUENCE * group.size)
    mine, ones = slice(me * stripe, (me + 1) * stripe), sequence.items[0].grads
    counters.items[0].grads[mine] = -1.0
    report("counting")
    while not books.is_over and books.issued(me) < SEQUENCE:
        cell = me * SEQUENCE + books.issued(me)
        ones[cell] = -1.0
        with books.update(me):
            for table in (counters, sequence):
                table.push(0).wait()
            ended = [table.commit(None) for table in (counters, sequence)]
            for work in ended:
                work.wait()
        ones[cell] = 0.0
        assert counters.items[0].params[mine].min() >= books.acked(me), "it does not see its own"
    books.rows[me, Books.DONE] = 1
    wait_for(lambda: books.rows[-1, Books.ISSUED])
    for table in (counters, sequence):
        table.pull().wait()
    return counters.items[0].params, sequence.items[0].params


def require_exact(
    books: Books, num_servers: int, counters: torch.Tensor, sequence: torch.Tensor
) -> None:
    assert set(sequence.unique().tolist()) <= {0.0, 1.0}
    for client, cells in enumerate(counters.chunk(WORKERS)):
        values = cells.unique_consecutive()
        assert len(values) <= num_servers, "a server has updated half of a stripe"
        assert values.min() >= books.acked(client), f"client {client}: an acknowledged one is lost"
        assert values.max() <= books.issued(client), f"client {client}: one was applied twice"
        flags = sequence[client * SEQUENCE :][:SEQUENCE]
        assert flags[: books.acked(client)].all(), f"client {client}: an acknowledged one is lost"
        assert not flags[books.issued(client) :].any()


def kill_while_counting(path: Path, hosts: list[int], stripe: int, seed: int) -> None:
    chosen = random.Random(seed)
    servers = len(hosts) - WORKERS
    victims = chosen.sample(range(WORKERS), chosen.choice([1, 2]))
    survivors = [worker for worker in range(WORKERS) if worker not in victims]
    books = Books(path, WORKERS)
    with started(WORKERS, count, str(path), stripe, hosts=hosts, servers=servers) as ranks:
        for worker in range(WORKERS):
            ranks.receive(worker)
        for victim in victims:
            time.sleep(chosen.random() * 0.1)
            ranks.kill(victim)
        for survivor in survivors:  # they go on
            before = books.acked(survivor)
            wait_for(lambda s=survivor, b=before: books.acked(s) > b + 3)
        books.end()
        wait_for(lambda: books.rows[survivors, Books.DONE].all())
        ranks.wait(60, victims)
        time.sleep(0.4)  # the servers hear of a death a little later
        books.rows[-1, Books.ISSUED] = 1
        outcomes = ranks.wait(60, survivors)
        ended = ranks.wait()
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert all(outcome.status == 0 for outcome in ended[WORKERS:]), ended
    for outcome in outcomes:
        require_exact(books, servers, *outcome.value)


@pytest.mark.parametrize(
    ("place", "stripe"),
    [
        ("one host", 4),
        ("one host", 150_000),
        ("server elsewhere", 150_000),  # most kills come in the middle of a payload
        ("two servers", 60_000),
    ],
)
def test_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, place: str, stripe: int) -> None:
    hosts = PLACES[place]
    kill_while_counting(tmp_path / "books", hosts, stripe, seed=len(hosts) + stripe)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES)
def test_many_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, hosts) -> None:
    for seed in range(40):
        stripe = random.Random(seed).choice([1, 60_000, 400_000])
        kill_while_counting(tmp_path / f"books{seed}", hosts, stripe, seed)
