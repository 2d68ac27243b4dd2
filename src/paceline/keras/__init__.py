"""`paceline.keras`: train a Keras 3 model on all workers, on TensorFlow, torch or JAX.

    model.compile("adam", "mse")
    paceline.keras.distribute(model)                  # or pace="local:8", "ps", "ssp:3"
    model.fit(*paceline.keras.shard(x, y), epochs=3)

    distributed.py    swaps the optimizer's class; adds a callback to every fit
    exchange.py       what happens to gradients and values in a step
    host.py           how arrays leave a compiled step, for each backend
    optimizers.py     the optimizer of torch that servers run for one of Keras
    fit.py            start, end of an epoch: broadcast, uneven data, statistics, metrics
    data.py           a worker's part of arrays, tf.data, PyDataset, loaders
    callbacks.py      for scripts that want the parts one by one

Importing this does not import Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "distribute": "paceline.keras.distributed",
    "shard": "paceline.keras.data",
    "broadcast": "paceline.keras.variables",
}

__all__ = ["broadcast", "callbacks", "distribute", "shard"]


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return importlib.import_module("paceline.keras.callbacks")
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.keras' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


if TYPE_CHECKING:
    from paceline.keras import callbacks as callbacks
    from paceline.keras.data import shard as shard
    from paceline.keras.distributed import distribute as distribute
    from paceline.keras.variables import broadcast as broadcast
