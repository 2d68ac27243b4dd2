"""Broadcasts of variables, and of Python values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.horovod import arrays, objects
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.tensorflow.host import on_host, tf


def broadcast_variables(
    variables: Any,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give every rank the root's values of tf.Variables or keras.Variables.

    They are matched by their order. A variable that is the same on all ranks stays what it is.
    """
    del inplace
    broadcast_(variables, root_rank, process_set=process_set)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Set variables to the root's values, and return them."""
    variables = list(variables)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise UsageError(
                f"broadcast_variables: {type(variable).__name__} is not a variable; use"
                " hvd.broadcast for tensors and hvd.broadcast_object for other values"
            )
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    if not tensors:
        return variables

    def run(*values: np.ndarray) -> list[np.ndarray]:
        base = name or process_set.next_name("broadcast_variables")
        names = [f"{base}.{number}" for number in range(len(values))]
        return arrays.broadcast_all(list(values), root_rank, names, process_set)

    new = on_host(run, tensors, [t.dtype for t in tensors], [t.shape for t in tensors])
    for variable, value in zip(variables, new, strict=True):
        variable.assign(value)
    return variables


def broadcast_global_variables(root_rank: int) -> None:
    """Raise UsageError: TensorFlow 2 keeps no list of variables."""
    raise UsageError(
        f"hvd.broadcast_global_variables({root_rank}) belongs to TensorFlow 1. Use"
        " hvd.broadcast_variables(model.variables, root_rank), or with Keras the callback"
        " BroadcastGlobalVariablesCallback"
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's value on every rank: plain values, tensors of torch, numpy arrays."""
    del session
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    del session
    return objects.allgather_object(obj, name, process_set)
