"""How tensors of TensorFlow reach the host: at once in eager mode, else from inside of the graph.

In a tf.function, `tf.numpy_function` is a stateful operation: all ranks that run the same function
start its operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.errors import HorovodInternalError
from paceline.frameworks.requirement import require
from paceline.horovod.host_errors import keep_errors

tf: Any = require("tensorflow")

Arrays = list[np.ndarray]
Shape = Sequence[int | None] | None


class OperationError(HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A failed operation in eager mode, for scripts that catch TensorFlow's error."""

    def __init__(self, error: HorovodInternalError) -> None:
        HorovodInternalError.__init__(self, str(error))
        self.peer_error = error.peer_error
        self._node_def = self._op = None
        self._message, self._error_code = str(error), tf.errors.FAILED_PRECONDITION

    def __str__(self) -> str:
        return str(self._message)


def on_host(
    function: Callable[..., Arrays],
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
    shapes: Sequence[Shape],
) -> list[Any]:
    """Return the tensors that `function(*arrays)` returns as arrays in memory of their own.

    In a graph the function runs each time that the graph does.
    """
    if not tf.executing_eagerly():
        results = tf.numpy_function(keep_errors(function), list(tensors), list(dtypes))
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return list(results)
    try:
        arrays = function(*(as_array(tensor) for tensor in tensors))
    except HorovodInternalError as error:
        raise OperationError(error) from error.__cause__
    return [tf.convert_to_tensor(array) for array in arrays]


def as_array(tensor: Any) -> np.ndarray:
    """Return the values of an eager tensor; a scalar stays an array."""
    return np.asarray(tensor.numpy(), tensor.dtype.as_numpy_dtype)


def label_for(kind: str, tensor: Any, name: str | None) -> str | None:
    """Return the name of an operation; None where it is counted when it runs (eager mode).

    In a graph an operation runs many times. Its name is made when the graph is: from the tensor's.
    """
    if name is not None or tf.executing_eagerly():
        return name
    plain = "".join(c if c.isalnum() or c in "_." else "_" for c in str(tensor.name))
    return str(tf.compat.v1.get_default_graph().unique_name(f"Horovod{kind}_{plain}"))
