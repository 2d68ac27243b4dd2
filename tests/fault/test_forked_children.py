"""Processes that a rank forks: they must not keep its links alive, nor disturb it when they end."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.comm.group import Group
from support import report, run_ranks, started

HOSTS = pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host each"])


class Numbers(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


@HOSTS
def test_a_child_does_not_hide_the_death_of_its_parent(hosts: int) -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(100_000)
        group.all_reduce(tensor)
        if group.rank == 1 and os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        report("looping")
        while True:
            group.all_reduce(tensor)

    with started(2, body, hosts=hosts) as ranks:
        ranks.receive_all()
        ranks.kill(1)
        [survivor] = ranks.wait(60, [0])
    assert isinstance(survivor.error, pl.errors.PeerLost) and survivor.error.rank == 1, survivor


@HOSTS
@pytest.mark.parametrize("how", ["os._exit", "sys.exit", "kill"])
def test_a_child_that_ends_does_not_disturb_its_parent(hosts: int, how: str) -> None:
    def body(group: Group, how: str) -> None:
        works = [group.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
        pid = os.fork()
        if pid == 0:
            if how == "sys.exit":
                sys.exit(0)  # runs what is registered for the end of the process
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        deadline_s = time.monotonic() + 60
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline_s, "the child hangs"
            time.sleep(0.01)
        for work in works:
            assert work.wait()[0].item() == 2
        for _ in range(20):
            assert group.all_reduce(torch.ones(50_000))[0].item() == 2
        other = pl.new_group([0, 1])
        assert other.all_reduce(torch.ones(1)).item() == 2

    run_ranks(2, body, how, hosts=hosts)


@HOSTS
def test_data_loader_workers(hosts: int) -> None:
    def body(group: Group) -> None:
        for _epoch in range(2):
            total = torch.zeros(())
            for batch in DataLoader(Numbers(), batch_size=16, num_workers=2):
                total += group.all_reduce(batch.sum())
            assert total.item() == 2 * sum(range(64))

    run_ranks(2, body, hosts=hosts)
