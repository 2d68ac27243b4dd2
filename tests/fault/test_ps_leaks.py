"""Jobs with servers that end in every way leave nothing behind."""

from __future__ import annotations

import random
import signal
import time

import pytest
import torch
from ps_tables import remote_table
from test_leaks import descriptors, directories, require_nothing_left

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime import job
from support import report, started
from support.ranks import ForkServer

ENDS = ["by themselves", "a worker is killed", "a server is killed", "all are killed"]


def use_servers(group: Group, ends: str) -> None:
    """Have tables in shared memory and in the servers' own; then work."""
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = pl.distribute(model, optimizer, pace="ps")
    table = remote_table("numbers", 10_000)
    listener = job.current().fabric.listener
    report((listener.unix_name, listener.tcp_address))
    steps = 5 if ends == "by themselves" else 1_000_000
    for _ in range(steps):
        model(torch.randn(2, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        table.push(0).wait()
        table.commit(None).wait()


def run_and_end(ends: str, hosts: list[int], chosen: random.Random) -> list[tuple[str, str]]:
    with started(2, use_servers, ends, hosts=hosts, servers=1) as ranks:
        told = [ranks.receive(worker) for worker in range(2)]
        if ends == "by themselves":
            ranks.values()
            return told
        time.sleep(chosen.random() * 0.1)
        ranks.kill_together({"a worker": [1], "a server": [2]}.get(ends[:8], [0, 1, 2]))
        if ends == "a server is killed":
            assert all(outcome.status == 1 for outcome in ranks.wait(60, [0, 1]))
        if ends == "a worker is killed":
            ranks.kill(0, signal.SIGINT)
            [server] = ranks.wait(60, [2])  # it ends when the last worker has left
            assert server.status == 0, server
        return told


def end_often(times: int, seed: int) -> None:
    chosen, server = random.Random(seed), ForkServer.get()
    run_and_end(ENDS[0], [0, 0, 0], chosen)  # what is made once is made now
    before = descriptors("self"), descriptors(server.pid)
    others = directories()
    told: list[tuple[str, str]] = []
    for number in range(times):
        told += run_and_end(ENDS[number % len(ENDS)], chosen.choice([[0, 0, 0], [0, 1, 0]]), chosen)
    require_nothing_left([name for name, _ in told], [address for _, address in told])
    assert (descriptors("self"), descriptors(server.pid)) == before
    assert directories() <= others


def test_a_few_jobs_leave_nothing_behind() -> None:
    end_often(8, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_jobs_leave_nothing_behind() -> None:
    end_often(100, seed=2)
