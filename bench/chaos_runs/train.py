"""The training that the chaos bench kills: an MLP learns scikit-learn's digits, elastically.

    paceline run -n 4 --min 1 bench/chaos_runs/train.py --steps 200 --diary DIRECTORY

Every process notes in a file of its own what it computes and what counts, so that the sum over all
files, also those of killed processes, says how much was computed and how much of that was useful.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.runtime.job import current


class Diary:
    """A line for each batch that is begun and each step that is done, at once on disk's side."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"{os.getpid()}.txt"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *parts: object) -> None:
        """Write one line; a killed process loses none that was written."""
        os.write(self._fd, (" ".join(map(str, (time.time(), *parts))) + "\n").encode())


def load(copies: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the digits, some of them several times with noise, and 360 to test with."""
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    noise = torch.Generator().manual_seed(1)
    many = images[train].repeat(copies, 1)
    many = many + 0.1 * torch.randn(many.shape, generator=noise)
    return TensorDataset(many, labels[train].repeat(copies)), TensorDataset(
        images[test], labels[test]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="of each worker")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--diary", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    pl.init()
    width = arguments.width
    train, test = load(copies=8)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = pl.distribute(model, optimizer)
    loader = DataLoader(train, arguments.batch, shuffle=True, drop_last=True)
    diary, job, epoch = Diary(arguments.diary), current(), 0
    where = [job.env.coordinator, job.env.secret_file, job.env.job_id]
    (arguments.diary / "job.json").write_text(
        json.dumps(where)
    )  # read by bench/chaos.py, which kills
    while job.steps_done < arguments.steps:
        for x, y in pl.shard(loader, epoch=epoch, seed=arguments.seed):
            diary.note("batch", len(x))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counted = len(x) if job.contribution.weight else 0  # 0: it took part with nothing
            diary.note("step", job.steps_done, counted, pl.world_size(), time.process_time())
            pl.report(loss=loss.item())
            if job.steps_done >= arguments.steps:
                break
        epoch += 1
    with torch.no_grad():
        x, y = test.tensors
        loss = F.cross_entropy(model(x), y).item()
        diary.note("end", loss, (model(x).argmax(1) == y).float().mean().item())


if __name__ == "__main__":
    main()
