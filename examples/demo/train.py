"""The training that `make demo` runs: with two workers, and as plain PyTorch in one process.

    paceline run -n 2 examples/demo/train.py
    python examples/demo/train.py --plain

An MLP of 4.8 million parameters learns scikit-learn's digits. The global batch is the same for any
number of workers: pl.shard(batch="global") divides it among them. One process and two workers
therefore take the same steps on the same samples, and differ only in speed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import paceline as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 1536


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images to train with and 360 to test with."""
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    """Return an MLP with three hidden layers."""
    layers: list[nn.Module] = [nn.Linear(64, WIDTH), nn.ReLU()]
    layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def train(steps: int, batch_size: int, plain: bool) -> tuple[nn.Module, list[float]]:
    """Return the trained model, and the time at which each step finished."""
    train_set, _ = load()
    loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if not plain:
        model, optimizer = pl.distribute(model, optimizer, pace="allreduce")
    finished_s: list[float] = []
    epoch = 0
    while len(finished_s) < steps:
        for images, labels in pl.shard(loader, epoch=epoch, batch="global"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            finished_s.append(time.perf_counter())
            pl.report(len(finished_s), loss=loss.item())
            if len(finished_s) == steps:
                break
        epoch += 1
    return model, finished_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
    parser.add_argument("--plain", action="store_true", help="leave out pl.distribute")
    parser.add_argument("--result", type=Path, help="where rank 0 writes what it measured")
    options = parser.parse_args()
    pl.init()
    torch.manual_seed(0)

    model, finished_s = train(options.steps, options.batch_size, options.plain)
    score = accuracy(model, *load()[1].tensors)
    pl.report(accuracy=score)
    if pl.rank() == 0 and options.result is not None:
        found = {
            "workers": pl.world_size(),
            "threads": torch.get_num_threads(),
            "batch": options.batch_size,
            "accuracy": score,
            "finished_s": finished_s,
        }
        options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
