"""`paceline.tensorflow`: means over all workers in loops of TensorFlow without Keras' fit().

    paceline.tensorflow.broadcast(variables)          once, before the first step
    grads = paceline.tensorflow.mean(tape.gradient(loss, variables))

Both work eagerly; `mean` also inside of tf.function (not with jit_compile=True: TensorFlow's XLA
cannot call the host). Importing this does not import TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.frameworks.averages import broadcast_values, group_for, mean_values, require_floating
from paceline.frameworks.requirement import require
from paceline.runtime.job import world_size

__all__ = ["broadcast", "mean"]


def mean(tensors: Any) -> Any:
    """Return the means over all workers of a tensor, or of the tensors in lists and dicts.

    Every worker calls it with the same structure. None stays None; IndexedSlices become dense.
    Operations of one tf.function run in the order of the program, on all workers.
    """
    tf = require("tensorflow")
    leaves = tf.nest.flatten(tensors)
    places = [i for i, leaf in enumerate(leaves) if leaf is not None]
    dense = [tf.convert_to_tensor(leaves[i]) for i in places]
    require_floating([x.dtype.as_numpy_dtype for x in dense], "paceline.tensorflow.mean")
    if world_size() == 1 or not dense:
        return tensors
    group_for("tensorflow mean")  # here, where an error of setting up is raised as it is
    if tf.executing_eagerly():
        arrays = [np.asarray(x.numpy(), x.dtype.as_numpy_dtype) for x in dense]
        results = [tf.convert_to_tensor(array) for array in _mean(*arrays)]
    else:
        results = tf.numpy_function(_mean, dense, [x.dtype for x in dense])
    for place, x, result in zip(places, dense, results, strict=True):
        result.set_shape(x.shape)
        leaves[place] = result
    return tf.nest.pack_sequence_as(tensors, leaves)


def _mean(*arrays: np.ndarray) -> list[np.ndarray]:
    return mean_values(group_for("tensorflow mean"), arrays)


def broadcast(variables: Sequence[Any], root: int = 0) -> None:
    """Give every worker the values that variables have on one; outside of tf.function."""
    tf = require("tensorflow")
    if not tf.executing_eagerly():
        raise UsageError("paceline.tensorflow.broadcast: call it outside of tf.function")
    values = [np.asarray(variable) for variable in variables]
    values = broadcast_values(group_for("tensorflow"), values, root)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
