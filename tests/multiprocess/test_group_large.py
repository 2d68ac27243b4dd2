"""Tensors beyond 2 GiB: no count or size may be cut to 32 bits anywhere."""

from __future__ import annotations

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

OVER_2_GIB = (2 << 30) + 4099

slow = pytest.mark.slow
patient = pytest.mark.timeout(600)


def probes(count: int) -> torch.Tensor:
    """Positions at the edges of 32-bit numbers and at the end."""
    edges = [0, 1, count // 2, (1 << 31) - 1, 1 << 31, count - 2, count - 1]
    return torch.tensor([edge for edge in edges if edge < count])


@slow
@patient
@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host each"])
@pytest.mark.parametrize("memory", ["torch", "engine"])
def test_reductions_and_moves(hosts: int, memory: str) -> None:
    def body(group: Group, memory: str) -> None:
        make = pl.empty if memory == "engine" else torch.empty
        tensor = make(OVER_2_GIB, dtype=torch.uint8).fill_(group.rank + 1)
        where = probes(OVER_2_GIB)
        tensor[where] = torch.arange(len(where), dtype=torch.uint8)
        group.all_reduce(tensor)
        assert tensor[where].tolist() == [2 * i for i in range(len(where))]
        tensor[where] = 3
        assert bool((tensor[:1000] == 3).any()) and int(tensor.max()) == 3 == int(tensor.min())
        tensor.fill_(group.rank)
        group.broadcast(tensor, root=1)
        assert int(tensor.min()) == 1

    run_ranks(2, body, memory, hosts=hosts, timeout_s=500)


@slow
@patient
@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host each"])
def test_a_transfer(hosts: int) -> None:
    def body(group: Group) -> None:
        tensor = torch.full((OVER_2_GIB,), 7 * (1 - group.rank), dtype=torch.uint8)
        if group.rank == 0:
            tensor[probes(OVER_2_GIB)] = 9
            group.send(tensor, 1)
        else:
            group.recv(tensor, 0)
            assert bool((tensor[probes(OVER_2_GIB)] == 9).all())
            assert int(tensor.min()) == 7

    run_ranks(2, body, hosts=hosts, timeout_s=500)
