"""Training on a real data set through servers learns what plain training learns.

scikit-learn's handwritten digits: 1437 images to train with, 360 to test with, a small MLP. Each
worker takes its third of every epoch. All-reduce recognises 97 of 100 after these epochs; guessing,
10.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from ways import Way

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

EPOCHS, BATCH, WORKERS = 6, 16, 3
LOCKSTEP = ["allreduce", "ps", "ps[server_dtype=bf16]", "ps[server_dtype=fp16,wire=fp16]"]
FREE = [
    *("async", "ssp:3", "ssp:3[unit=version]", "async[push=delta]", "async[compensate=dc]"),
    *("async[lr=staleness]", "async[softsync=2]", "async[server_dtype=bf16,wire=bf16]"),
]
BETWEEN_HOSTS = ["ps", "async", "ssp:3", "async[server_dtype=bf16,wire=bf16]"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file with the images and their labels."""
    from sklearn.datasets import load_digits  # slow to import, so only once

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.from_numpy(found.data[order]).float() / 16
    labels = torch.from_numpy(found.target[order]).long()
    file = tmp_path_factory.mktemp("digits") / "digits.pt"
    torch.save((images, labels), file)
    return str(file)


def learn(group: Group, pace: str, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Train; return the share of test images that are recognised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    # Free-running workers make three updates where lockstep makes one, of a third of the data.
    lr = 0.05 if pace in FREE else 0.15
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    pl.distribute(model, optimizer, pace=pace, bucket_mb=0.05)
    mine = torch.arange(1437)[group.rank :: group.size]
    random = torch.Generator().manual_seed(group.rank)
    for _ in range(EPOCHS):
        for rows in mine[torch.randperm(len(mine), generator=random)].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    group.barrier()
    model.pull()
    with torch.no_grad():
        right = model(images[1437:]).argmax(1) == labels[1437:]
    group.barrier()
    return float(right.float().mean())


def learn_all(group: Group, paces: list[str], file: str) -> dict[str, float]:
    data = torch.load(file)
    return {pace: learn(group, pace, *data) for pace in paces}


@pytest.mark.parametrize(
    ("hosts", "paces"),
    [
        ([0] * 5, LOCKSTEP + FREE),
        pytest.param([0, 1, 0, 0, 1], BETWEEN_HOSTS, marks=pytest.mark.slow),
    ],
)
def test_digits_are_learned(digits: str, hosts: list[int], paces: list[str]) -> None:
    by_rank = run_ranks(WORKERS, learn_all, paces, digits, servers=2, hosts=hosts)
    for accuracies in by_rank:
        for pace, accuracy in accuracies.items():
            assert accuracy > 0.92, pace
        if "allreduce" in accuracies:
            assert accuracies["ps"] == accuracies["allreduce"]


def test_a_model_in_half_precision_has_a_master_copy() -> None:
    """Small updates would be lost in bfloat16; the servers add them up in float32."""

    def body(group: Group) -> torch.Tensor:
        way = Way(group, "ps")
        model = nn.Linear(10, 4, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        way.distribute(model, optimizer)
        for _ in range(64):  # each step is an eighth of what bfloat16 can tell from 1
            optimizer.zero_grad()
            (model(torch.ones(1, 10, dtype=torch.bfloat16)).sum() * 2**-11).backward()
            optimizer.step()
        return model.weight.detach().clone()

    for hosts in ([0, 0, 0], [0, 1, 0]):
        for weight in run_ranks(2, body, servers=1, hosts=hosts):
            assert weight.dtype is torch.bfloat16
            assert torch.equal(weight.float(), torch.full((4, 10), 1 - 64 * 2**-11)), hosts
