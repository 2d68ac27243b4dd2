"""Ranks that disagree: every one of them gets CollectiveMismatch that names both sides."""

from __future__ import annotations

import time

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import outcomes_of

PLACES = {"one host": 1, "a host each": 3, "2 and 1": (0, 0, 1)}
everywhere = pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())

SMALL, LARGE = 10, 300_000  # in the slot; through staging buffers or the ring


def _same(group: Group, count: int) -> object:
    return group.all_reduce(torch.ones(count))


# what the others call, what rank 1 calls, what the message must contain
CASES = {
    "count": (
        _same,
        lambda g, n: g.all_reduce(torch.ones(n + 1)),
        ["all_reduce", "float32[{n}]", "float32[{n1}]"],
    ),
    "shape": (
        lambda g, n: g.all_reduce(torch.ones(n, 2)),
        lambda g, n: g.all_reduce(torch.ones(2, n)),
        ["float32[{n},2]", "float32[2,{n}]"],
    ),
    "dtype": (
        _same,
        lambda g, n: g.all_reduce(torch.ones(n, dtype=torch.int32)),
        ["float32[{n}]", "int32[{n}]"],
    ),
    "operation": (_same, lambda g, n: g.all_reduce(torch.ones(n), "max"), ["sum", "max"]),
    "kind": (_same, lambda g, n: g.broadcast(torch.ones(n), 1), ["all_reduce", "broadcast"]),
    "barrier": (_same, lambda g, _: g.barrier(), ["all_reduce", "barrier"]),
    "root": (
        lambda g, n: g.broadcast(torch.ones(n), 0),
        lambda g, n: g.broadcast(torch.ones(n), 1),
        ["root 0", "root 1"],
    ),
    "reduce root": (
        lambda g, n: g.reduce(torch.ones(n), 0),
        lambda g, n: g.reduce(torch.ones(n), 2),
        ["root 0", "root 2"],
    ),
    "gathered count": (
        lambda g, n: g.all_gather(torch.ones(n)),
        lambda g, n: g.all_gather(torch.ones(n + 1)),
        ["all_gather", "rank 1"],
    ),
    "all_to_all sizes": (
        lambda g, n: g.all_to_all([torch.ones(n)] * g.size),
        lambda g, n: g.all_to_all([torch.ones(n - 1)] * g.size),
        ["all_to_all", "rank 1"],
    ),
    "scattered count": (
        lambda g, n: g.scatter(torch.ones(n), [torch.ones(n)] * 3 if g.rank == 0 else None),
        lambda g, n: g.scatter(torch.ones(n + 2)),
        ["scatter", "rank 1"],
    ),
    "reduce_scatter count": (
        lambda g, n: g.reduce_scatter(torch.ones(3 * n)),
        lambda g, n: g.reduce_scatter(torch.ones(3 * n + 3)),
        ["reduce_scatter"],
    ),
}


def disagree(group: Group, case: str, count: int) -> tuple[str, float]:
    """Agree a few times, then not; return the error's text and how long it took."""
    usual, odd, _ = CASES[case]
    begin_s = time.monotonic()
    try:
        for _ in range(3):  # a slow rank may still be here when the others disagree
            group.all_reduce(torch.ones(count))
        (odd if group.rank == 1 else usual)(group, count)
        # A rank may have its part before the disagreement shows; then the next call tells.
        group.barrier()
        group.barrier()
    except pl.errors.CollectiveMismatch as error:
        text = str(error)
    else:
        raise AssertionError(f"nobody noticed: {case}")
    took_s = time.monotonic() - begin_s
    with pytest.raises(pl.errors.CollectiveMismatch):  # for good
        group.barrier()
    return text, took_s


def require_both_sides(case: str, count: int, text: str) -> None:
    # Whoever sends without waiting can be one call further when the others look at it.
    is_further = "rank 1 called barrier #5" in text
    for word in CASES[case][2][: 1 if is_further else None]:
        assert word.format(n=count, n1=count + 1) in text, (case, text)
    assert "rank 1" in text and ("rank 0" in text or "rank 2" in text), (case, text)
    assert "disagree" in text


@everywhere
@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
def test_everybody_is_told_who_disagrees(count: int, hosts) -> None:
    def body(world: Group) -> list[tuple[str, float]]:
        # A group of its own for each case: one that failed stays so, and the others do not care.
        return [disagree(pl.new_group(world.ranks), case, count) for case in CASES]

    for outcome in outcomes_of(3, body, hosts=hosts):
        assert outcome.error is None, outcome
        for case, (text, took_s) in zip(CASES, outcome.value, strict=True):
            assert took_s < 20, (case, took_s)  # 2 s, with room for a busy machine
            require_both_sides(case, count, text)


@everywhere
def test_an_extra_collective_on_one_rank(hosts) -> None:
    def body(group: Group) -> str:
        try:
            for step in range(20):
                group.all_reduce(torch.ones(1000))
                if step == 7 and group.rank == 1:
                    group.all_reduce(torch.ones(3))
        except pl.errors.CollectiveMismatch as error:
            return str(error)
        return "nobody noticed"

    for outcome in outcomes_of(3, body, hosts=hosts):
        assert "float32[1000]" in outcome.value and "float32[3]" in outcome.value, outcome
        assert "#9" in outcome.value, outcome  # which call it was


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host each"])
def test_a_transfer_of_another_size_or_dtype(hosts: int) -> None:
    def body(group: Group, sent: torch.Tensor, expected: torch.Tensor) -> str:
        with pytest.raises(pl.errors.CollectiveMismatch) as caught:
            if group.rank == 0:
                group.send(sent, 1, tag=5)
                group.barrier()
            else:
                group.recv(expected, 0, tag=5)
        return str(caught.value)

    for expected in (torch.ones(11), torch.ones(10, dtype=torch.int32)):
        for outcome in outcomes_of(2, body, torch.ones(10), expected, hosts=hosts):
            assert outcome.error is None, outcome
            dtype = str(expected.dtype).removeprefix("torch.")
            assert "rank 0 sends 10 float32 with tag 5" in outcome.value
            assert f"rank 1 receives {len(expected)} {dtype}" in outcome.value


def _fails_with_a_long_text(group: Group) -> str:
    try:
        group.barrier()  # the hosts are connected
        # Between hosts a text is cut after 4000 bytes: here in the middle of a character.
        if group.rank == 0:
            group._core.fail("x" * 2 + "\u20ac" * 5000)
        group.all_reduce(torch.ones(1))
    except pl.errors.GenerationChanged as error:
        return str(error)
    return ""


def test_an_error_text_that_is_not_utf8_reaches_all_ranks() -> None:
    for outcome in outcomes_of(4, _fails_with_a_long_text, hosts=2):
        text = outcome.value
        assert text.startswith("xx" + "\u20ac" * 100)
