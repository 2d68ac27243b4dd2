"""Checkpoints on the test device: saved without a wait, resumed to the bit, and exchanged with the
CPU. Batches come in pinned memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from support.devices import load_device, require_no_wait_of_the_script, run_on_device
from support.ranks import run_ranks

LAST, SAVED = 6, 3
PACES = {"allreduce": 0, "diloco:2": 0, "ps": 1}  # and servers


def train(world, device: str, pace: str, directory: str):
    """Train to the last step; return the values at the beginning, at the end, and what was said."""
    where = pl.device() if device != "cpu" else torch.device("cpu")
    torch.manual_seed(3)
    layers = (nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 4))
    model = nn.Sequential(*layers).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pl.distribute(model, optimizer, pace=pace)
    data = TensorDataset(torch.randn(96, 12), torch.randint(0, 4, (96,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=True)
    checkpoint = pl.Checkpoint(directory, every=SAVED, keep=4)
    laggard = load_device() if device != "cpu" else None
    first = values(model)
    for x, y in pl.shard(loader, epoch=0):
        assert laggard is None or (x.is_pinned() and y.is_pinned())
        x, y = x.to(where, non_blocking=True), y.to(where, non_blocking=True)
        if laggard is not None:
            torch.accelerator.synchronize()
            laggard.take_synchronizations()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        checkpoint.step()
        if laggard is not None:
            require_no_wait_of_the_script(laggard)
        if checkpoint.steps == LAST:
            break
    checkpoint.wait()
    return first, values(model)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers())]


def copy_of(directory: Path, step: int, name: str) -> str:
    """Copy one checkpoint to a directory of its own."""
    target = directory.parent / name
    shutil.copytree(directory / f"step-{step:09d}", target / f"step-{step:09d}")
    return str(target)


@pytest.mark.parametrize("pace", PACES)
def test_a_checkpoint_resumes_on_devices_and_on_the_cpu(pace, schedule, tmp_path):
    servers = PACES[pace]

    def on_device(directory: str) -> list[Any]:
        return run_on_device(
            2, train, "laggard", pace, directory, schedule=schedule, servers=servers, timeout_s=120
        )

    def on_cpu(directory: str) -> list[Any]:
        return run_ranks(2, train, "cpu", pace, directory, servers=servers)

    whole = on_device(str(tmp_path / "device"))
    resumed = on_device(copy_of(tmp_path / "device", SAVED, "again"))
    for (_, right), (_, found) in zip(whole, resumed, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)
    moved = on_cpu(copy_of(tmp_path / "device", SAVED, "moved"))
    back = on_device(copy_of(tmp_path / "moved", LAST, "back"))
    for rank in range(2):
        torch.testing.assert_close(moved[rank][0], resumed[rank][0], rtol=0, atol=0)
        torch.testing.assert_close(back[rank][0], moved[rank][1], rtol=0, atol=0)
