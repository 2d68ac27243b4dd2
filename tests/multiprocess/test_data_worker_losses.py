"""Data workers that die or are stopped: the batches are the same, and only come later."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest
from data_worker_samples import Noisy, Stream, comparable, double, shift
from torch.utils.data import DataLoader

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks
from support.body import receive, report
from support.ranks import started


def halting(_: Group, *, waits: bool) -> list[Any]:
    """Take all batches, but wait for the test after the third."""
    made = pl.shard(DataLoader(Noisy(400), 4, shuffle=True), seed=3, mode="pipeline")
    read = pl.shard(DataLoader(Stream(400), 4), seed=3, mode="pipeline", stages=[double, shift])
    batches = list[Any]()
    for pair in zip(made, read, strict=True):
        batches.append(comparable(pair))
        if len(batches) == 3 and waits:
            report("three")
            receive()
    return batches


def halts(group: Group) -> list[Any]:
    return halting(group, waits=True)


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    return run_ranks(2, lambda group: halting(group, waits=False))


@pytest.mark.parametrize(
    ("data_workers", "victims", "number", "hosts", "text"),
    [
        ((2,), [2], signal.SIGKILL, 1, "data worker 0 "),
        ((2,), [2, 3], signal.SIGKILL, 1, "NONE IS LEFT"),
        ((1, 1), [2], signal.SIGKILL, 1, "NONE IS LEFT"),
        ((2,), [3], signal.SIGKILL, [0, 0, 0, 1], "data worker 1 "),
        ((2,), [2], signal.SIGSTOP, 1, "data worker 0 "),
    ],
    ids=["one", "all", "of a stage", "on another host", "stopped"],
)
def test_batches_of_a_lost_data_worker_are_made_by_others(
    undisturbed: list[Any],
    data_workers: Sequence[int],
    victims: Sequence[int],
    number: signal.Signals,
    hosts: Any,
    text: str,
) -> None:
    env = {"PACELINE_LIVENESS_S": "3"}  # with less, a starved process counts as stopped
    with started(2, halts, data_workers=data_workers, hosts=hosts, env=env) as ranks:
        for rank in range(2):
            ranks.receive(rank)
        for victim in victims:
            ranks.kill(victim, number)
        for rank in range(2):
            ranks.send(rank, "go on")
        outcomes = ranks.wait(ranks=[0, 1])
        said = "".join(map(ranks.output, range(4)))
    assert [outcome.value for outcome in outcomes] == undisturbed
    assert text in said, said
