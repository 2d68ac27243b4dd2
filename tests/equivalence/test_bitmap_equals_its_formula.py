"""The vote on signs computes what its formula says, bit by bit where nothing is rounded."""

from __future__ import annotations

import time

import imitation
import pytest
import torch
from imitation import loss_of, make_model, players
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.data_parallel.training import Training
from paceline.runtime.job import current
from support import receive, report, run_ranks
from support.elastic import elastic_job
from support.on_device import on_host

STEPS = 12
TIGHT = {"rtol": 1e-9, "atol": 1e-11}  # float64; sums of sizes in another order
RATE = 0.01
SMALL = "bucket_mb=0.001"  # so that there are several buckets, and slices of no word at all

Flat = torch.Tensor


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def flat(model: nn.Module) -> Flat:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def places(bucket_bytes: float) -> tuple[list[int], list[torch.Tensor]]:
    """Where elements lie: from the last parameter to the first, each on a cache line.

    Returns for every element its index, and for every bucket its elements.
    """
    line, index, starts, cuts = 8, 0, {}, [[]]
    shapes = [param.numel() for param in make_model().parameters()]
    for number in reversed(range(len(shapes))):
        size = sum(shapes[other] * 8 for other in cuts[-1])
        if cuts[-1] and size + shapes[number] * 8 > bucket_bytes:
            cuts.append([])
        cuts[-1].append(number)
        starts[number] = index
        index += -(-shapes[number] // line) * line
    indices = [starts[n] + i for n, count in enumerate(shapes) for i in range(count)]
    at = [sum(shapes[:number]) for number in range(len(shapes) + 1)]
    elements = torch.arange(at[-1])
    return indices, [torch.cat([elements[at[n] : at[n + 1]] for n in bucket]) for bucket in cuts]


def train_all(group: Group, paces: list[str]) -> list[Flat]:
    del group
    found = []
    for pace in paces:
        model = make_model()
        model, optimizer = pl.distribute(model, sgd(model), pace=pace)
        assert (training_of(model)._setup.centre is None) == (not current().servers)
        for step in range(STEPS):
            loss_of(model, pl.rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        with model.agreed():
            found.append(flat(model))
    return found


CASES = {
    "bitmap": (0.9, False, 0),
    "bitmap[momentum=0]": (0.0, False, 0),
    "bmuf_bitmap[momentum=0.5,seed=7]": (0.5, False, 7),
    f"bitmap[{SMALL}]": (0.9, False, 0),
    "bitmap[feedback=yes,momentum=0]": (0.0, True, 0),
    f"bitmap[feedback=yes,{SMALL}]": (0.9, True, 0),
}


@pytest.mark.parametrize(
    ("workers", "hosts", "servers"),
    [
        *((1, 1, 0), (2, 1, 0), (2, 2, 0), (3, 1, 0), (3, 3, 0), (4, 1, 0), (4, 2, 0)),
        *((2, 1, 1), (3, 2, 2), (4, 1, 2)),  # counted by servers
    ],
)
def test_the_formula(workers: int, hosts: int, servers: int) -> None:
    by_rank = run_ranks(workers, train_all, list(CASES), hosts=hosts, servers=servers)
    for number, (pace, (momentum, feedback, seed)) in enumerate(CASES.items()):
        indices, buckets = places(1049 if SMALL in pace else 1 << 20)
        team = players(workers, sgd)
        options = {"momentum": momentum, "feedback": feedback, "seed": seed}
        ties = imitation.vote(team, STEPS, indices, buckets, **options)  # type: ignore[arg-type]
        assert (ties > 100) == (workers % 2 == 0), "what this test is about"
        for rank, player in enumerate(team):
            found = by_rank[rank][number]
            if feedback:
                torch.testing.assert_close(found, player.flat, **TIGHT, msg=f"{pace} {rank}")
            else:
                assert torch.equal(found, player.flat), f"{pace} {rank}"


def repeat_votes(group: Group, paces: list[str]) -> list[tuple[Flat, Flat]]:
    """Train as usual, and with every vote done again; return what comes out of both."""
    found = []
    for pace in paces:
        model = make_model()
        model, optimizer = pl.distribute(model, sgd(model), pace=pace)
        reducer = training_of(model).reducer
        voters = on_host(reducer._exchange)._method.voters.values()
        for step in range(STEPS):
            loss_of(model, pl.rank(), step).backward()
            before = [(voter.vote_state.signs.clone(), voter.vote_state.scale) for voter in voters]
            for voter, (signs, scale) in zip(voters, before, strict=True):
                voter.vote_state.signs.zero_()
                voter.vote(reducer.step - 1)
                assert (
                    torch.equal(voter.vote_state.signs, signs) and voter.vote_state.scale == scale
                )
            optimizer.step()
            optimizer.zero_grad()
        found.append(flat(model))
    return list(zip(train_all(group, paces), found, strict=True))


@pytest.mark.parametrize("servers", [0, 1])
def test_a_repeated_vote_is_the_same(servers: int) -> None:
    """Gradients come into momentum and error once, however often a pass is voted on."""
    for outcome in run_ranks(2, repeat_votes, list(CASES), servers=servers):
        for pace, (once, repeated) in zip(CASES, outcome, strict=True):
            assert torch.equal(once, repeated), pace


def vote_without_a_step(group: Group, second: float) -> float:
    """Return what is agreed on in a second pass, with momentum 0.5; the first one saw 1.0."""
    del group
    weight = nn.Linear(1, 1, bias=False)
    weight, optimizer = pl.distribute(weight, sgd(weight), pace="bitmap[momentum=0.5]")
    for grad in (1.0, second):
        optimizer.zero_grad()
        weight(torch.tensor([[grad]])).sum().backward()
    return weight.weight.grad.item()


def test_a_pass_that_no_step_follows_is_in_the_momentum() -> None:
    assert run_ranks(1, vote_without_a_step, -0.4) == [1.0]
    assert run_ranks(1, vote_without_a_step, -0.6) == [-1.0]


def test_one_worker_takes_its_own_signs() -> None:
    (found,) = run_ranks(1, train_all, ["bitmap[momentum=0]"])
    (alone,) = players(1, sgd)
    for step in range(STEPS):
        alone.step_with(alone.backward(step).sign())
    assert torch.equal(found[0], alone.flat)


def learn_of_nothing(group: Group) -> list[list[float]]:
    """Gradients of exactly zero, on all workers or on all but one."""
    del group
    rows = nn.Embedding(4, 70)
    torch.nn.init.zeros_(rows.weight)
    rows, optimizer = pl.distribute(
        rows, torch.optim.SGD(rows.parameters(), lr=1.0), pace="bitmap[momentum=0]"
    )
    for _ in range(8):
        row = torch.tensor([0, 1] if pl.rank() == 1 else [0, 0])
        rows(row).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return rows.weight.detach().tolist()


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_what_has_no_gradient_stays_where_it_is(workers: int) -> None:
    everywhere, one, *nowhere = run_ranks(workers, learn_of_nothing)[0]
    assert set(everywhere) == {-8.0}
    # Of an even number of steps each takes back the one before.
    assert all(set(row) == {0.0} for row in nowhere)
    # Who says something is heard, if not every time: the others' coins are as often on its side.
    assert max(one) <= 0 and sum(one) / len(one) < -2


def use_other_types(group: Group, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """A gradient with NaN and infinity on one of three workers; two of them see numbers."""
    del group
    weight = nn.Linear(6, 1, bias=False).to(dtype)
    torch.nn.init.zeros_(weight.weight)
    weight, optimizer = pl.distribute(
        weight, torch.optim.SGD(weight.parameters(), lr=1.0), pace="bitmap[momentum=0.5]"
    )
    bad = [float("nan"), float("inf"), -float("inf"), 1.0, 1e-7, 0.0]
    good = [1.0, 1.0, 1.0, 1.0, 1e-7, -1.0]
    for row in (bad if pl.rank() == 1 else good, [1.0] * 6):
        weight(torch.tensor([row], dtype=dtype)).sum().backward()
        first = weight.weight.grad.flatten().tolist()
        optimizer.step()
        optimizer.zero_grad()
    return weight.weight.detach().flatten().tolist(), first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_small_types_and_numbers_that_are_none(dtype: torch.dtype) -> None:
    for weights, last in run_ranks(3, use_other_types, dtype):
        # In the first step the two who see numbers win; in the second nobody is ill any more.
        assert last == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        assert weights == [-2.0, -2.0, -2.0, -2.0, -2.0, 0.0]


VOTES = 20


def training_of(model: nn.Module) -> Training:
    return pl.data_parallel.distribute._switchers[model].training


def count_bytes(group: Group, pace: str) -> tuple[int, int]:
    """Return what was handed to others, and what the engine has written to its sockets."""
    del group
    model = nn.Sequential(nn.Linear(1000, 130), nn.Linear(130, 77))
    model, optimizer = pl.distribute(model, sgd(model), pace=pace)
    vote = on_host(training_of(model).reducer._exchange)
    before = current().fabric.engine.bytes_sent()
    for _ in range(VOTES):
        model(torch.ones(4, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    written = sum(current().fabric.engine.bytes_sent()) - sum(before)
    return vote.sent_bytes, written


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_bytes_that_travel(workers: int) -> None:
    """Each on a host of its own; the roll call travels as well, and every message has a header."""
    cache_line, signs = 16, 64
    shapes = [77, 130 * 77, 130, 130 * 1000]
    elements = sum(-(-count // cache_line) * cache_line for count in shapes)
    words = -(-elements // signs)  # in one bucket
    by_rank = run_ranks(workers, count_bytes, "bitmap", hosts=workers)
    total = sum(handed for handed, _ in by_rank) / VOTES
    assert total == 2 * (workers - 1) * words * 8
    ring = 2 * (workers - 1) * elements * 4
    assert total <= ring / 32 + 2 * (workers - 1) * 8
    for handed, written in by_rank:
        assert abs(handed / VOTES - total / workers) <= 2 * (workers - 1) * 8, "shared out evenly"
        assert handed <= written <= handed + VOTES * 1000 * (workers - 1)
    with_scales = run_ranks(workers, count_bytes, "bitmap[feedback=yes]", hosts=workers)
    scales = workers * (workers - 1) * 8
    assert sum(handed for handed, _ in with_scales) / VOTES == total + scales


LOST_IN = 5


def lose_the_last(group: Group, pace: str) -> tuple[Flat, list[float]]:
    """The last worker is killed where the others have voted already; batches weigh differently."""
    del group
    model = make_model()
    model, optimizer = pl.distribute(model, sgd(model), pace=pace)
    if "feedback" not in pace:
        training_of(model).reducer.weighting.set(0.5 + 0.5 * pl.rank())
    sizes = set()
    for step in range(STEPS):
        if step == LOST_IN and pl.rank() == 2:
            report("here")
            receive()
        loss_of(model, pl.rank(), step).backward()
        sizes |= {size for p in model.parameters() for size in p.grad.abs().unique().tolist()}
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), sorted(sizes)


@pytest.mark.parametrize(("momentum", "feedback"), [(0.9, False), (0.0, False), (0.9, True)])
def test_a_repeated_step_counts_once(momentum: float, feedback: bool) -> None:
    policy = Policy(num_workers=3, is_elastic=True, min_workers=1, max_workers=3)
    with elastic_job(policy) as job:
        more = ",feedback=yes" if feedback else ""
        job.start(lose_the_last, f"bitmap[momentum={momentum}{more},{SMALL}]")
        assert job.ranks.receive(2) == "here"
        time.sleep(0.5)  # so that the others wait for its votes
        job.ranks.kill(2)
        outcomes = job.ranks.wait(60)
    assert [outcome.status for outcome in outcomes] == [0, 0, -9], "\n".join(map(str, outcomes))
    team, (indices, buckets) = players(3, sgd), places(1049)

    def left(step: int) -> int:
        return 3 if step < LOST_IN else 2

    options = {"momentum": momentum, "feedback": feedback}
    imitation.vote(team, STEPS, indices, buckets, left=left, **options)  # type: ignore[arg-type]
    for rank in (0, 1):
        weights, sizes = outcomes[rank].value
        if feedback:
            torch.testing.assert_close(weights, team[rank].flat, **TIGHT)
            continue
        assert sizes == [1.0], "weights have no part in a count"
        assert torch.equal(weights, team[rank].flat)
