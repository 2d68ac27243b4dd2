"""Checkpoints that an earlier version has written are loaded whole, and saved as they were.

`checkpoints-format-1.tar.xz` has one of each kind of state, saved by two workers behind step 6,
before parts and states were one protocol (ADR 36). Each is loaded, and saved again at once: the
same tensors under the same names, and the same content, so nothing was left out and nothing moved.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.state.files import load as reading
from support import run_ranks

ARCHIVE = Path(__file__).with_name("checkpoints-format-1.tar.xz")
SAVED = {
    "powersgd": "allreduce[compress=powersgd:2(min=16)]",
    "diloco": "diloco:4[compress=int8(feedback=yes,min=16)]",
    "bitmap": "bitmap[feedback=yes]",
    "partial": "partial:0.5[carry=yes]",
    "easgd": "easgd:3",
}
SERVED = {"bmuf": "bmuf:4[after=2]"}


def load_and_save(group: Group, paces: dict[str, str], root: str) -> list[int]:
    """Go on from each checkpoint, and save it again elsewhere; return behind which steps."""
    del group
    found = []
    for name, pace in paces.items():
        net: Any = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 2))
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        net, optimizer = pl.distribute(net, optimizer, pace=pace)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        objects = {"model": net, "scheduler": scheduler}
        before = pl.Checkpoint(f"{root}/{name}", resume="always", **objects)
        again = pl.Checkpoint(f"{root}/again/{name}", resume="never", **objects)
        again.save()
        again.wait()
        pl.world().barrier()
        found.append(before.steps)
    return found


@pytest.mark.parametrize(("paces", "servers"), [(SAVED, 0), (SERVED, 1)], ids=["workers", "served"])
def test_it_is_loaded_and_saved_as_it_was(
    paces: dict[str, str], servers: int, tmp_path: Path
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    steps = run_ranks(2, load_and_save, paces, str(tmp_path), servers=servers)
    assert steps == [[6] * len(paces)] * 2
    for name in paces:
        (before,), (after,) = (
            reading.list_checkpoints(tmp_path / name),
            reading.list_checkpoints(tmp_path / "again" / name),
        )
        old, new = reading.load(before.path), reading.load(after.path)
        assert old.tensors.keys() == new.tensors.keys(), name
        for entry, value in old.tensors.items():
            assert torch.equal(value, new.tensors[entry]), (name, entry)
        assert _comparable(old.content) == _comparable(new.content), name


def _comparable(content: Any) -> Any:
    """Leave out the options: a version may have more of them."""
    models = [{**model, "options": None} for model in content["common"]["models"]]
    return {**content, "common": {**content["common"], "models": models}}
