"""Who waits for another part of the model is seen to wait, not to compute."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime.job import current
from support import run_ranks

PAUSE_S = 1.5


@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2", "pp=2"])
def test_the_others_wait_for_the_slow_part(mesh: str) -> None:
    def body(group: Group) -> float:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(8, 8), torch.zeros(8, dtype=torch.long)
        model, optimizer = pl.distribute(
            model, optimizer, mesh=mesh, loss=F.cross_entropy, example=x
        )
        model.train_step(x, y)
        waiting = current().reporter.waiting
        before_s = waiting.seconds
        group.barrier()
        if group.rank == 1:
            time.sleep(PAUSE_S)
        model.train_step(x, y)
        return waiting.seconds - before_s

    fast_s, slow_s = run_ranks(2, body)
    # The fast one may be late by itself on a busy machine, but hardly by a second.
    assert fast_s > PAUSE_S / 3, (fast_s, slow_s)
    assert slow_s < fast_s, (fast_s, slow_s)
