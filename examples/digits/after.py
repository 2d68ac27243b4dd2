"""Train an MLP on scikit-learn's handwritten digits, alone or with several workers.

    diff examples/digits/before.py examples/digits/after.py    what makes it distributed
    python examples/digits/before.py                           plain PyTorch
    paceline run -n 2 examples/digits/after.py                 two workers

The batch size is per worker: two workers with --batch-size 32 take the same steps as one with
--batch-size 64. Every worker tests the full model, so all workers print the same.
"""

from __future__ import annotations

import argparse

import paceline as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images to train with and 360 to test with."""
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the loss and the accuracy."""
    model.eval()
    scores = model(images)
    model.train()
    loss = F.cross_entropy(scores, labels)
    return float(loss), float((scores.argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    pl.init()
    torch.manual_seed(0)

    train_set, test_set = load()
    train = DataLoader(train_set, options.batch_size, shuffle=True)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    model, optimizer = pl.distribute(model, optimizer, pace="allreduce")

    for epoch in range(options.epochs):
        for images, labels in pl.shard(train, epoch=epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        test_loss, accuracy = evaluate(model, *test_set.tensors)
        print(f"epoch {epoch + 1}: test loss {test_loss:.4f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
