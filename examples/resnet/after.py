"""Train a small ResNet on scikit-learn's handwritten digits, scaled to twice their size.

    diff examples/resnet/before.py examples/resnet/after.py    what makes it distributed
    python examples/resnet/before.py                           plain PyTorch
    paceline run -n 2 examples/resnet/after.py                 two workers

It has batch norms, whose statistics depend on the samples in the batch. after.py uses those of the
global batch, so that two workers with --batch-size 32 train like one with --batch-size 64.
"""

from __future__ import annotations

import argparse

import paceline as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, wide_in: int, wide: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(wide_in, wide, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.around: nn.Module = nn.Identity()
        if wide_in != wide:
            shrink = nn.Conv2d(wide_in, wide, 1, stride, bias=False)
            self.around = nn.Sequential(shrink, nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.around(x))


def resnet(width: int = 16) -> nn.Module:
    """Return a network of three blocks for images of 16 x 16."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images to train with and 360 to test with."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    images = F.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)
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
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    options = parser.parse_args()
    pl.init()
    torch.manual_seed(0)

    train_set, test_set = load()
    train = DataLoader(train_set, options.batch_size, shuffle=True)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    model, optimizer = pl.distribute(model, optimizer, pace="allreduce", batchnorm="global")

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
