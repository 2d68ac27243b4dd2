"""How many connections between hosts a job opens: those that it uses."""

from __future__ import annotations

import contextlib
import os

import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

HOSTS, LOCAL = 3, 4


def num_connections() -> int:
    """Return the TCP connections of this process."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in list(table)[1:]]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in own for row in rows)


def train(group: Group) -> tuple[int, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(3):
        model(torch.ones(4, 64) * group.rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    group.barrier()
    found = num_connections(), sum(p.sum().item() for p in model.parameters())
    group.barrier()
    return found


def test_all_reduce_opens_few_connections() -> None:
    found = run_ranks(HOSTS * LOCAL, train, hosts=HOSTS, timeout_s=120)
    counts, sums = zip(*found, strict=True)
    print(counts)
    assert len(set(sums)) == 1
    # Four groups with two lanes: all pairs would be 64 for each worker. The objects that workers
    # gather at the start need all pairs of one lane of one group.
    assert sum(counts) < HOSTS * LOCAL * 64 / 4, counts
