"""Memory, descriptors and threads that cannot be had: an error with sizes, no SIGBUS or hang."""

from __future__ import annotations

import os
import resource
import threading

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import outcomes_of, run_ranks
from support.environs import job_environs
from support.ranks import run_processes


def limit_file_size(num_bytes: int) -> None:
    """Let the kernel refuse larger memfds, as a full machine does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def test_more_than_the_machine_has() -> None:
    def body(group: Group) -> None:
        with pytest.raises(pl.errors.SharedMemoryError, match="MB available"):
            pl.empty(1 << 44, dtype=torch.uint8)
        with pytest.raises((pl.errors.PacelineError, ValueError, OverflowError, MemoryError)):
            pl.empty(1 << 62)
        tensor = pl.empty(1000).fill_(1)
        assert group.all_reduce(tensor).sum().item() == 2000

    run_ranks(2, body)


def test_a_segment_that_cannot_be_sized() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            limit_file_size(8 << 20)
            with pytest.raises(pl.errors.SharedMemoryError, match="File too large"):
                pl.empty(1 << 20)
            limit_file_size(resource.RLIM_INFINITY)
        tensor = pl.empty(100_000).fill_(1)
        assert group.all_reduce(tensor).sum().item() == 200_000

    run_ranks(2, body)


@pytest.mark.parametrize("creator", [0, 1])
def test_a_group_that_cannot_be_made(creator: int) -> None:
    def body(group: Group, creator: int) -> None:
        if group.rank == creator:
            limit_file_size(64 << 10)
        ranks = [creator, 1 - creator]
        with pytest.raises(pl.errors.SharedMemoryError):
            pl.new_group(ranks)
        limit_file_size(resource.RLIM_INFINITY)
        assert pl.new_group(ranks).all_reduce(torch.ones(1)).item() == 2

    run_ranks(2, body, creator)


def test_a_channel_that_cannot_be_made() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            limit_file_size(64 << 10)  # the lower rank makes it
        tensor = torch.ones(10)
        with pytest.raises(pl.errors.PacelineError, match="shared memory"):
            if group.rank == 0:
                group.send(tensor, 1)
            else:
                group.recv(tensor, 0)

    for outcome in outcomes_of(2, body):
        assert outcome.error is None and outcome.status == 0, outcome


def join_with(number: int, limit: str) -> str:
    """Join as rank `number`; rank 1 has hardly anything to do it with."""
    if number == 1 and limit == "memory":
        limit_file_size(1024)
    elif number == 1 and limit == "threads":
        limit_threads()
    elif number == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 6, 4096))
    try:
        pl.init()
    except pl.errors.PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def limit_threads() -> None:
    """Let no thread be started from Python: there is no address space for its stack."""
    with open("/proc/self/statm") as statm:
        used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (256 << 20), resource.RLIM_INFINITY))
    threading.stack_size(1 << 30)


@pytest.mark.parametrize("limit", ["memory", "descriptors", "threads"])
def test_a_rank_that_cannot_join(limit: str) -> None:
    def body(number: int) -> str:
        return join_with(number, limit)

    env = {"PACELINE_JOIN_TIMEOUT_S": "3", "PACELINE_TIMEOUT_S": "3"}
    with job_environs(2, env=env) as environs:
        outcomes = run_processes(body, environs)
    for outcome in outcomes:
        assert outcome.error is None and outcome.value != "joined", outcome
    if limit == "threads":
        assert outcomes[1].value.startswith("SetupError: rank 1 of 2 cannot join:"), outcomes[1]
        assert "thread" in outcomes[1].value and "paceline doctor" in outcomes[1].value
