"""Scaled losses, and gradients that go to servers through a codec."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.errors import UsageError
from support import run_ranks


def train(group: Group, paces: list[str]) -> list[str]:
    """Return by pace what torch's own GradScaler is told; "" where it may be used."""
    found = []
    for pace in paces:
        torch.manual_seed(0)
        model = nn.Linear(64, 32)
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = pl.distribute(model, made, pace=pace)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        said = ""
        for _ in range(3):
            loss = model(torch.ones(4, 64)).square().mean()
            scaler.scale(loss).backward()
            try:
                scaler.step(optimizer)
            except UsageError as error:
                said = str(error)
                break
            scaler.update()
            optimizer.zero_grad()
        found.append(said)
        group.barrier()
    return found


@pytest.mark.filterwarnings("ignore")
def test_what_waits_must_not_be_scaled() -> None:
    paces = ["ps[compress=topk:0.1]", "ps[compress=int8]", "async[compress=topk:0.1]"]
    for kept, rounded, free in run_ranks(2, train, paces, servers=1):
        assert "scale of another step" in kept
        assert rounded == free == ""
