"""Train an MLP on scikit-learn's handwritten digits: the loop, written by hand.

    python examples/trainer/by_hand.py
    paceline run -n 2 examples/trainer/by_hand.py
    paceline run --mesh pp=2 examples/trainer/by_hand.py
    diff examples/trainer/by_hand.py examples/trainer/with_trainer.py    the same with pl.Trainer

It clips gradients, follows a schedule, evaluates each epoch on all workers, and resumes where it
stopped if it is started again (--save DIRECTORY). Both files print the same numbers.
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


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the accuracy."""
    return (scores.argmax(1) == labels).float().mean()


@torch.no_grad()
def evaluate(model: nn.Module, test: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy over all workers; each worker evaluates its shard of the images."""
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with model.agreed():
        for images, labels in pl.shard(test, pad=False):
            scores = model(images)
            means = [F.cross_entropy(scores, labels), accuracy(scores, labels), 1.0]
            sums += len(labels) * torch.tensor(means, dtype=torch.float64)
    model.train()
    pl.world().all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--save", metavar="DIRECTORY")
    options = parser.parse_args()
    pl.init()
    torch.manual_seed(0)

    train_set, test_set = load()
    train = DataLoader(train_set, options.batch_size, shuffle=True)
    test = DataLoader(test_set, 64)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    example = train_set.tensors[0][: options.batch_size]
    model, optimizer = pl.distribute(
        model, optimizer, loss=F.cross_entropy, max_norm=1.0, example=example
    )
    checkpoint = pl.Checkpoint(options.save, scheduler=scheduler) if options.save else None

    for epoch in pl.epochs(options.epochs):
        for images, labels in pl.shard(train, epoch=epoch):
            loss = model.train_step(images, labels)
            pl.report(loss=loss)
            if checkpoint:
                checkpoint.step()
        test_loss, share = evaluate(model, test)
        scheduler.step()
        if pl.rank() == 0:
            print(f"epoch {epoch + 1}: test loss {test_loss:.6f}, accuracy {share:.3f}")
        if checkpoint:
            checkpoint.save()


if __name__ == "__main__":
    main()
