"""Operations on values of Keras, on any backend: outside of compiled steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.horovod import arrays
from paceline.horovod.compression import Compression
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, choose_op


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the reduced value of all ranks as a tensor; the mean by default."""
    op, scales = choose_op(op, average), (prescale_factor, postscale_factor)
    sent, context = compression.compress(_array(value))
    reduced = arrays.allreduce(sent, name, op, scales, process_set)
    return _tensor(compression.decompress(reduced, context))


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the values of all ranks, concatenated along the first dimension."""
    return _tensor(arrays.allgather(_array(value), name, process_set))


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's value."""
    return _tensor(arrays.broadcast(_array(value), root_rank, name, process_set))


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this rank's rows of the reduced value."""
    return _tensor(arrays.reducescatter(_array(value), name, op, (1.0, 1.0), process_set))


def broadcast_global_variables(root_rank: int) -> None:
    """Raise UsageError: Keras 3 keeps no list of variables."""
    raise UsageError(
        f"hvd.broadcast_global_variables({root_rank}) belongs to TensorFlow 1. Use the callback"
        " BroadcastGlobalVariablesCallback, or hvd.broadcast_variables(model.variables, root_rank)"
    )


def _array(value: Any) -> np.ndarray:
    keras = require("keras")
    is_plain = isinstance(value, np.ndarray | np.generic | int | float | bool | list | tuple)
    return np.asarray(value if is_plain else keras.ops.convert_to_numpy(value))


def _tensor(array: np.ndarray) -> Any:
    return require("keras").ops.convert_to_tensor(array)
