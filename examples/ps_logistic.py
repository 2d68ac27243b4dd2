"""Logistic regression in numpy, with the weights on a parameter server.

    paceline run -n 2 -s 1 examples/ps_logistic.py        (--pace ps, async or ssp:3)

The training loop is plain numpy: there is no model object and no backward pass. Every worker has a
share of the images. It computes a gradient, pushes it to the server and receives fresh weights.
The server runs the optimizer.
"""

from __future__ import annotations

import argparse

import numpy as np
import paceline as pl
from sklearn.datasets import load_digits

NUM_CLASSES = 10


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training images and labels, test images and labels; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.data))
    images, labels = digits.data[order].astype(np.float32) / 16, digits.target[order]
    images = np.hstack([images, np.ones_like(images[:, :1])])  # the last column is the bias
    split = int(0.8 * len(images))
    return images[:split], labels[:split], images[split:], labels[split:]


def gradient(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean cross-entropy."""
    logits = images @ weights
    errors = np.exp(logits - logits.max(axis=1, keepdims=True))
    errors /= errors.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    return images.T @ errors / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pace", default="async")
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()

    pl.init()
    train_x, train_y, test_x, test_y = load(seed=0)
    x, y = train_x[pl.rank() :: pl.world_size()], train_y[pl.rank() :: pl.world_size()]
    random = np.random.default_rng(pl.rank())

    client = pl.ps.Client(options.pace)
    weights = np.zeros((x.shape[1], NUM_CLASSES), dtype=np.float32)
    client.init("weights", weights, optimizer="SGD", lr=0.1, momentum=0.9)

    num_steps = options.epochs * (len(train_y) // pl.world_size() // 32)  # equal on all workers
    for _ in range(num_steps):
        batch = random.choice(len(y), size=32, replace=False)
        grad = gradient(weights, x[batch], y[batch])
        client.push_pull("weights", grad, out=weights).wait()

    pl.world().barrier()  # the last push of every worker counts
    client.pull("weights", out=weights).wait()
    accuracy = np.mean((test_x @ weights).argmax(axis=1) == test_y)
    if pl.rank() == 0:
        print(f"{client.version('weights')} updates: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
