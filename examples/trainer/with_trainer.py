"""Train an MLP on scikit-learn's handwritten digits: with pl.Trainer and a callback.

    python examples/trainer/with_trainer.py
    paceline run -n 2 examples/trainer/with_trainer.py
    paceline run -n 2 -s 1 --pace ssp:3 examples/trainer/with_trainer.py
    paceline run --mesh pp=2 examples/trainer/with_trainer.py
    diff examples/trainer/by_hand.py examples/trainer/with_trainer.py    the same, written by hand

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


class Lines(pl.Callback):
    """Print one line per epoch, on rank 0 only."""

    def on_train_epoch_end(self, trainer: pl.Trainer) -> None:
        if pl.rank() == 0:
            test_loss, share = trainer.metrics["val_loss"], trainer.metrics["val_accuracy"]
            print(f"epoch {trainer.epoch + 1}: test loss {test_loss:.6f}, accuracy {share:.3f}")


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
    trainer = pl.Trainer(
        model,
        optimizer,
        F.cross_entropy,
        scheduler=scheduler,
        max_norm=1.0,
        metrics={"accuracy": accuracy},
        callbacks=[Lines()],
        checkpoint=options.save,
        example=example,
    )
    trainer.fit(train, epochs=options.epochs, val_loader=test)


if __name__ == "__main__":
    main()
