"""Groups whose membership changes: survivors go on, without a trace of the old generation."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime import job
from support import receive, report, run_ranks, started

PLACES = {"one host": 1, "a host each": 4, "2 hosts with 2": 2, "mixed": (0, 1, 0, 1)}
everywhere = pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())


def require_right(group: Group) -> None:
    """Use the group in several ways and check what comes out."""
    n = group.size
    for count in (1, 5000, 400_000):
        total = group.all_reduce(torch.full((count,), float(group.rank + 1)))
        assert bool((total == n * (n + 1) / 2).all())
    gathered = group.all_gather(torch.tensor([pl.rank()]))
    assert [x.item() for x in gathered] == list(group.ranks)
    for peer in range(n):
        if peer != group.rank:
            work = group.send(torch.tensor([group.rank]), peer, async_op=True)
            received = torch.zeros(1, dtype=torch.int64)
            assert group.recv(received, peer) == peer and received.item() == peer
            work.wait()


@everywhere
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_survivors_of_a_kill_go_on(hosts, victim: int) -> None:
    def body(group: Group, victim: int) -> None:
        report("here")
        try:
            while True:
                group.all_reduce(torch.ones(200_000))
        except pl.errors.PeerError as error:
            assert error.rank == victim, error
        group.reconfigure(job.current().fabric.membership.without([victim]))
        assert (group.size, group.generation) == (3, 2)
        assert group.ranks == tuple(rank for rank in range(4) if rank != victim)
        require_right(group)

    with started(4, body, victim, hosts=hosts) as ranks:
        ranks.receive_all()
        time.sleep(0.1)
        ranks.kill(victim)
        for outcome in ranks.wait(60, [rank for rank in range(4) if rank != victim]):
            assert outcome.error is None and outcome.status == 0, outcome


@everywhere
def test_one_after_the_other_leaves(hosts) -> None:
    def body(group: Group) -> None:
        membership = job.current().fabric.membership
        for leaver in (3, 1, 0):
            if pl.rank() == leaver:
                os._exit(0)
            membership = membership.without([leaver])
            group.reconfigure(membership)
            require_right(group)
            # Whoever comes out of this first changes the membership under the others.
            with contextlib.suppress(pl.errors.PeerError):
                group.barrier()

    with started(4, body, hosts=hosts) as ranks:
        outcomes = ranks.wait(60)
    assert [o.status for o in outcomes] == [0] * 4, outcomes
    assert outcomes[2].error is None, outcomes[2]


@everywhere
def test_operations_in_flight_end_with_generation_changed(hosts) -> None:
    def body(group: Group) -> None:
        group.barrier()
        membership = job.current().fabric.membership
        if pl.rank() == 3:
            receive()  # the others wait for it in vain
            return
        works = [group.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
        works.append(group.recv(torch.ones(5), 3, async_op=True))
        blocked: list[BaseException] = []
        is_near = threading.Event()

        def block() -> None:
            is_near.set()
            try:
                group.barrier()
            except pl.errors.PacelineError as error:
                blocked.append(error)

        thread = threading.Thread(target=block)
        thread.start()
        is_near.wait()
        time.sleep(0.3)
        group.reconfigure(membership.without([3]))
        for work in works:
            with pytest.raises(pl.errors.GenerationChanged, match="generation 1 to 2"):
                work.wait(50)
        thread.join(50)
        assert [type(error) for error in blocked] == [pl.errors.GenerationChanged]
        require_right(group)

    with started(4, body, hosts=hosts) as ranks:
        outcomes = ranks.wait(ranks=[0, 1, 2])
        ranks.send(3, "over")
        outcomes += ranks.wait(ranks=[3])
    assert all(o.error is None and o.status == 0 for o in outcomes), "\n".join(map(str, outcomes))


def test_wrong_memberships_are_refused() -> None:
    def body(group: Group) -> None:
        membership = job.current().fabric.membership
        with pytest.raises(pl.errors.UsageError, match="generation 1, but the group is at 1"):
            group.reconfigure(membership)
        later = membership.without([2])
        if pl.rank() == 2:
            with pytest.raises(pl.errors.UsageError, match="rank 2 is not in generation 2"):
                group.reconfigure(later)
            return
        group.reconfigure(later)
        with pytest.raises(
            pl.errors.UsageError, match="pass a membership with a higher generation"
        ):
            group.reconfigure(later)
        require_right(group)

    run_ranks(3, body)
