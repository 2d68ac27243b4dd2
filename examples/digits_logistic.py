"""Distributed logistic regression on scikit-learn's digits, with gradients all-reduced by hand.

    paceline run -n 2 examples/digits_logistic.py        (or: python examples/digits_logistic.py)

Every rank holds the same weights and an equal share of the 1437 training images. In each step it
computes the gradient of its share. The mean over the ranks is the gradient of the full training
set, so all ranks take the same step and stay equal without sending weights.
"""

from __future__ import annotations

import argparse

import paceline as pl
import torch
from sklearn.datasets import load_digits

NUM_CLASSES = 10


def load(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images and labels, test images and labels; the same on every rank."""
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    split = int(0.8 * len(images))
    return images[:split], labels[:split], images[split:], labels[split:]


def accuracy(weights: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float(((images @ weights[:-1] + weights[-1]).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    pl.init()
    world = pl.world()
    images, labels, test_images, test_labels = load(options.seed)
    # Equal shares, so that the mean of the means is the mean over all images.
    share = len(images) // pl.world_size()
    mine = slice(pl.rank() * share, (pl.rank() + 1) * share)
    x, y = images[mine], labels[mine]

    weights = torch.zeros(images.shape[1] + 1, NUM_CLASSES)  # the last row is the bias
    velocity = torch.zeros_like(weights)
    # One message per step: the gradient, followed by the loss, which is averaged too.
    message = pl.empty((weights.numel() + 1,), dtype=torch.float32)
    for step in range(1, options.steps + 1):
        probabilities = (x @ weights[:-1] + weights[-1]).softmax(1)
        loss = -probabilities.gather(1, y[:, None]).log().mean()
        probabilities[torch.arange(len(y)), y] -= 1
        gradient = torch.cat([x.T @ probabilities, probabilities.sum(0, keepdim=True)]) / len(y)

        message[:-1] = gradient.flatten()
        message[-1] = loss
        world.all_reduce(message, op="mean")

        velocity = 0.9 * velocity + message[:-1].view_as(weights)
        weights -= options.lr * velocity
        if step % 5 == 0 or step == options.steps:
            score = accuracy(weights, test_images, test_labels)
            pl.report(step, loss=float(message[-1]), accuracy=score)

    # If all ranks have equal bits, the minimum and the maximum over the ranks are equal.
    low, high = weights.clone(), weights.clone()
    world.all_reduce(low, op="min")
    world.all_reduce(high, op="max")
    if not torch.equal(low, high):
        raise SystemExit(f"rank {pl.rank()}: the ranks have different weights")
    if pl.rank() == 0:
        score = accuracy(weights, test_images, test_labels)
        print(f"test accuracy {score:.3f} on {len(test_labels)} images")
        print(f"all {pl.world_size()} ranks hold the same weights, bit for bit")
    pl.shutdown()


if __name__ == "__main__":
    main()
