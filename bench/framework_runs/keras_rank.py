"""One worker of keras_steps.py: the 25 M MLP in Keras, with and without communication, in turns.

    KERAS_BACKEND=jax paceline run -n 2 keras_rank.py PACE ROUNDS STEPS

Both models are in the same processes, so that both see the same machine. A turn is one `fit` of
some steps; the first of each model compiles it and does not count. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np

import paceline as pl
import paceline.keras as pk

_WIDTHS = (1024, 3072, 3072, 3072, 1024)  # models.mlp
_BATCH = 64


def make_model() -> Any:
    layers: list[Any] = [keras.Input((_WIDTHS[0],))]
    layers += [keras.layers.Dense(wide, activation="relu") for wide in _WIDTHS[1:-1]]
    model = keras.Sequential([*layers, keras.layers.Dense(_WIDTHS[-1])])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def use_one_thread() -> None:
    if keras.config.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)


def main() -> None:
    pace, rounds, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    use_one_thread()
    pl.init()
    rng = np.random.default_rng(pl.rank())
    x = rng.standard_normal((steps * _BATCH, _WIDTHS[0])).astype("float32")
    y = rng.integers(0, _WIDTHS[-1], steps * _BATCH)
    models = {"alone": make_model(), "together": make_model()}
    pk.distribute(models["together"], pace=pace)
    found: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(rounds + 1):
        for name, model in models.items():
            pl.world().barrier()
            start_s = time.perf_counter()
            model.fit(x, y, batch_size=_BATCH, shuffle=False, verbose=0)
            if round_:
                found[name].append((time.perf_counter() - start_s) / steps)
    everyone = pl.world().all_gather(np.array([found["alone"], found["together"]]))
    if pl.rank() == 0:
        slow = np.maximum.reduce(everyone)
        print(json.dumps({"alone": slow[0].tolist(), "together": slow[1].tolist()}), flush=True)


if __name__ == "__main__":
    main()
