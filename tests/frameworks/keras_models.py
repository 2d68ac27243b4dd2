"""Models and data for the checks of Keras, and what one process alone would compute."""

from __future__ import annotations

import keras
import numpy as np

import paceline as pl
from paceline.comm.object_collectives import all_gather_object

SAMPLES, BATCH = 64, 8


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((SAMPLES, 12)).astype("float32")
    return x, (x[:, :1] * 2 - x[:, 1:2] + 0.5).astype("float32")


def make(*, norm: bool = False, dropout: bool = False) -> keras.Model:
    layers: list[keras.layers.Layer] = [keras.Input((12,)), keras.layers.Dense(16)]
    layers += [keras.layers.BatchNormalization()] if norm else []
    layers += [keras.layers.Dropout(0.5)] if dropout else []
    layers += [keras.layers.Activation("relu"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def same_start(model: keras.Model) -> keras.Model:
    """Give a model weights that only depend on its shapes."""
    rng = np.random.default_rng(5)
    model.set_weights([rng.standard_normal(w.shape) * 0.1 for w in model.get_weights()])
    return model


def mine(array: np.ndarray) -> np.ndarray:
    """This worker's part: batch by batch what rank 0, rank 1, ... have of a global batch."""
    rows = array.reshape(-1, pl.world_size(), BATCH // pl.world_size(), *array.shape[1:])
    return rows[:, pl.rank()].reshape(-1, *array.shape[1:])


def fit_alone(model: keras.Model, epochs: int = 2) -> keras.Model:
    """Train in this process alone, on all samples."""
    model.fit(*data(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model


def fit_mine(model: keras.Model, epochs: int = 2, **more: object) -> keras.callbacks.History:
    x, y = data()
    size = BATCH // pl.world_size()
    return model.fit(
        mine(x), mine(y), batch_size=size, epochs=epochs, shuffle=False, verbose=0, **more
    )


def assert_close(model: keras.Model, other: keras.Model, tolerance: float = 2e-5) -> None:
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


def assert_same_everywhere(model: keras.Model) -> None:
    """All workers have the same weights, bit by bit."""
    sums = [w.astype("float64").tobytes().hex()[:4000] for w in model.get_weights()]
    everyone = all_gather_object(pl.world(), sums)
    assert all(one == everyone[0] for one in everyone), "weights differ between workers"
