"""One worker of keras_steps.py: the 25 M MLP in Keras; a turn is one `fit` of some steps.

python -m framework_runs.keras_rank KIND SOCKET BARRIER       (started by keras_steps.py)

plain     Keras alone, in a process without Paceline
kept      the same, and malloc keeps freed memory, as it does in Paceline's workers
others    a pace of Paceline
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from harness.barrier import SpinBarrier
from harness.controller import take_turns
from harness.training_kinds import keep_freed_memory

from framework_runs.turns import rank_and_world

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


def prepare(kind: str) -> Any:
    """Return the model of this contender."""
    if kind == "plain":
        return make_model()
    if kind == "kept":
        from paceline.runtime.heap import keep_memory_of_xla

        keep_freed_memory()
        keep_memory_of_xla()
        return make_model()
    import paceline as pl
    import paceline.keras as pk

    pl.init()
    return pk.distribute(make_model(), pace=kind)


def main() -> None:
    kind, socket_path, barrier_path = sys.argv[1:]
    use_one_thread()
    model = prepare(kind)
    rank, world = rank_and_world()
    barrier = SpinBarrier(Path(barrier_path), rank, world)
    rng = np.random.default_rng(rank)

    def fit(steps: int) -> None:
        x = rng.standard_normal((steps * _BATCH, _WIDTHS[0])).astype("float32")
        y = rng.integers(0, _WIDTHS[-1], steps * _BATCH)
        model.fit(x, y, batch_size=_BATCH, shuffle=False, verbose=0)

    def turn(request: dict[str, Any]) -> dict[str, Any]:
        fit(request["warmup"])
        spans = []
        if request["steps"]:
            barrier.wait()
            start_s = time.perf_counter()
            fit(request["steps"])
            spans = [(start_s, time.perf_counter())]
        return {"spans": spans}

    take_turns(socket_path, {"version": f"keras {keras.__version__}"}, turn)


if __name__ == "__main__":
    main()
