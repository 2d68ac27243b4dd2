"""How far workers drift apart under random stalls: never further than the pace allows.

Each worker counts in a place of its own: its gradient is -1 there and 0 elsewhere, and the rate is
1, so the parameters are, at any time, the number of updates of each worker that are in them. What a
worker reads thus says exactly which updates it sees; `counts` are the reads of a worker, one per
finished step. There are two such parameters, in buckets of their own, on different servers if there
are two.
"""

from __future__ import annotations

import random
import time
import warnings

import msgspec
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.observe.telemetry.staleness import TableReport
from paceline.ps import messages as m
from paceline.runtime import job
from support import run_ranks

STEPS = 25
STALL_S = 0.01


class Counters(nn.Module):
    """The number of updates of each worker, twice."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.zeros(num_workers))
        self.there = nn.Parameter(torch.zeros(num_workers))

    def forward(self, worker: int) -> torch.Tensor:
        return -(self.here[worker] + self.there[worker])

    def counts(self) -> tuple[list[int], list[int]]:
        return (
            [int(count) for count in self.here.detach()],
            [int(count) for count in self.there.detach()],
        )


Counts = list[tuple[list[int], list[int]]]  # two parameters, after each step


# -- in the ranks ---------------------------------------------------------------------------------


def distributed(group: Group, pace: str) -> tuple[Counters, torch.optim.Optimizer]:
    model = Counters(group.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pl.distribute(model, optimizer, pace=pace, bucket_mb=1e-6)
    return model, optimizer


def count(
    group: Group, model: Counters, optimizer: torch.optim.Optimizer, stalls_s: list[float]
) -> Counts:
    """Make a step for every stall; return what is read behind each."""
    seen = []
    for stall_s in stalls_s:
        optimizer.zero_grad()
        loss = model(group.rank)
        time.sleep(stall_s)
        loss.backward()
        optimizer.step()
        seen.append(model.counts())
    return seen


def stall_randomly(group: Group, paces: list[str]) -> list[tuple[Counts, list[TableReport]]]:
    """Stall now and then, each worker at other times; at every pace in turn."""
    found = []
    for number, pace in enumerate(paces):
        stalls = random.Random(100 * number + group.rank)
        model, optimizer = distributed(group, pace)
        group.barrier()
        seen = count(
            group,
            model,
            optimizer,
            [STALL_S * stalls.choice((0, 0, 0, 0.2, 0.5, 4)) for _ in range(STEPS)],
        )
        group.barrier()
        found.append((seen, newest_reports()))
        group.barrier()
    return found


def race(group: Group, pace: str, head_start: int) -> int:
    """Let the last worker begin when the others have made some steps; return how far this is ahead.

    If they could not make them without it, this would never end.
    """
    model, optimizer = distributed(group, pace)
    last, go, seen = group.size - 1, torch.zeros(1), Counts()
    if group.rank == last:
        for other in range(last):
            group.recv(go, other)
    else:
        seen = count(group, model, optimizer, [0.0] * head_start)
        group.send(go, last)
    seen += count(group, model, optimizer, [0.0] * (STEPS - len(seen)))
    group.barrier()
    return max(clock - min(counts) for clock, both in enumerate(seen, start=1) for counts in both)


def newest_reports() -> list[TableReport]:
    """Ask every server what it has counted about the table that was made last."""
    found = []
    for link in job.current().servers:
        reports = [msgspec.convert(r, TableReport) for r in link.ask(m.Stats).wait().reports]
        if reports:
            found.append(max(reports, key=lambda report: float(report.table.split()[1])))
    return found


# -- in the test session --------------------------------------------------------------------------


def require_own_updates(of_workers: list[Counts]) -> None:
    """Read-my-writes, and nothing is lost, applied twice or taken back."""
    for worker, seen in enumerate(of_workers):
        for clock, both in enumerate(seen, start=1):
            for counts in both:
                assert counts[worker] == clock, (worker, clock, counts)
        for before, after in zip(seen, seen[1:], strict=False):
            for old, new in zip(before, after, strict=True):
                assert all(a <= b for a, b in zip(old, new, strict=True)), (worker, old, new)


def most_ahead(of_workers: list[Counts]) -> int:
    """Return how many steps a worker was ahead of what it saw of another's, at most."""
    return max(
        clock - min(counts)
        for seen in of_workers
        for clock, both in enumerate(seen, start=1)
        for counts in both
    )


def stalest(reports: list[TableReport]) -> int:
    return max(max(worker.staleness) for report in reports for worker in report.workers)


def require_all_counted(reports: list[TableReport], num_workers: int) -> None:
    for report in reports:
        assert report.version == num_workers * STEPS
        for worker in report.workers:
            assert worker.updates == sum(worker.staleness.values()) == STEPS


@pytest.mark.parametrize(
    ("num_workers", "hosts"), [(4, [0] * 5), (3, [0] * 5), (3, [0, 0, 1, 0, 1])]
)
def test_the_bound_is_never_exceeded(num_workers: int, hosts: list[int]) -> None:
    paces = ["ssp:1", "ssp:3", "ssp:0[unit=version]", "ssp:1[unit=version]", "ssp:3[unit=version]"]
    num_servers = len(hosts) - num_workers
    by_rank = run_ranks(num_workers, stall_randomly, paces, servers=num_servers, hosts=hosts)
    for number, pace in enumerate(paces):
        of_workers = [found[number][0] for found in by_rank]
        reports = by_rank[0][number][1]
        assert len(reports) == num_servers
        require_own_updates(of_workers)
        require_all_counted(reports, num_workers)
        bound = int(pace[4])
        if "version" in pace:
            assert stalest(reports) <= bound, pace
        else:
            assert most_ahead(of_workers) <= bound, pace
            assert stalest(reports) <= (num_workers - 1) * (2 * bound + 1), pace


def test_fast_workers_run_ahead_as_far_as_they_may() -> None:
    def body(group: Group) -> list[int]:
        return [race(group, pace, head_start) for pace, head_start in races]

    races = [("ssp:1", 1), ("ssp:4", 4), ("async", STEPS)]
    for ahead in run_ranks(3, body, servers=2)[:2]:
        assert ahead == [1, 4, STEPS]


@pytest.mark.parametrize("pace", ["ssp:1", "ssp:0[unit=version]", "async[softsync=1]", "ps"])
def test_who_ends_early_holds_up_nobody(pace: str) -> None:
    def body(group: Group) -> Counts:
        model, optimizer = distributed(group, pace)
        steps = 4 if group.rank == 0 else STEPS
        return count(group, model, optimizer, [0.0] * steps)

    early, *others = run_ranks(3, body, servers=2)
    assert len(early) == 4
    for seen in others:
        assert len(seen) == STEPS
        if pace.startswith("ssp"):
            assert [both[0][0] for both in seen][-1] == 4
    if pace.startswith("ssp"):
        require_own_updates([early, *others])


def test_lockstep_means_the_same_values_for_all() -> None:
    by_rank = run_ranks(3, stall_randomly, ["ps", "ssp:0"], servers=2)
    for number in range(2):
        first = by_rank[0][number][0]
        assert all(found[number][0] == first for found in by_rank)
        for report in by_rank[0][number][1]:
            assert report.version == STEPS
            assert all(worker.staleness == {0: STEPS} for worker in report.workers)


def leave_one_out(group: Group, pace: str) -> tuple[list[float], int]:
    """The second worker never uses one of the parameters, and the others do."""
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "rare": nn.Linear(2, 1)})
    before = model["rare"].weight.detach().clone()
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), pace=pace)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            output = model["used"](torch.ones(1, 2))
            if group.rank != 1:
                output = output + model["rare"](torch.ones(1, 2))
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    group.barrier()
    model.pull()
    moved = (model["rare"].weight.detach() - before).abs().max().item()
    return [moved], sum("no gradient on rank" in str(one.message) for one in said)


@pytest.mark.parametrize("pace", ["async", "ssp:2"])
def test_a_worker_without_some_gradients_holds_up_nobody(pace: str) -> None:
    found = run_ranks(2, leave_one_out, pace, servers=1)
    assert [number for _, number in found] == [0, 1], "who lacks them says so, once"
    assert all(moved[0] > 0 for moved, _ in found)
