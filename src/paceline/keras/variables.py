"""The variables of a Keras model as numpy arrays, and their agreement between workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.comm.object_collectives import all_gather_object
from paceline.frameworks.averages import broadcast_values, group_for, mean_values
from paceline.frameworks.requirement import require
from paceline.runtime.job import world_size

_GROUP = "keras"


def numpy_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Return the values of variables, outside of compiled code."""
    keras = require("keras")
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    """Set variables, outside of compiled code."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(np.array(value).reshape(tuple(variable.shape)))


def broadcast(model: Any, root: int = 0) -> None:
    """Give every worker the weights and the optimizer state of one. Collective.

    Seeds stay each worker's own, so that dropout differs between workers.
    """
    optimizer = getattr(model, "optimizer", None)
    state = list(optimizer.variables) if optimizer is not None and optimizer.built else []
    own = {id(seed) for seed in seed_states(model)}
    variables = [v for v in [*model.variables, *state] if id(v) not in own]
    assign(variables, broadcast_values(group_for(_GROUP), numpy_of(variables), root))


def average_statistics(model: Any) -> None:
    """Average the statistics of batch norms and their like over all workers. Collective."""
    variables = [v for v in model.non_trainable_variables if is_floating(v)]
    if variables:
        assign(variables, mean_values(group_for(_GROUP), numpy_of(variables)))


def average_logs(logs: dict[str, Any] | None, is_last: bool = False) -> bool:
    """Replace metrics by their means over the workers that have them. Collective.

    Return whether `is_last` is set on any worker.
    """
    if world_size() == 1 or logs is None:
        return is_last
    own = {name: float(value) for name, value in logs.items()}
    gathered = all_gather_object(group_for(_GROUP), [own, is_last])
    for name in own:
        found = [values[name] for values, _ in gathered if name in values]
        logs[name] = sum(found) / len(found)
    return any(stops for _, stops in gathered)


def is_floating(variable: Any) -> bool:
    """Return whether a variable has floating-point numbers."""
    return "float" in str(variable.dtype)


def seed_states(model: Any) -> list[Any]:
    """Return the states of a model's random number generators."""
    return [
        generator.state
        for layer in model._flatten_layers()
        for generator in getattr(layer, "_seed_generators", [])
    ]


def make_seeds_differ(model: Any, rank: int) -> None:
    """Move the seeds apart, once: workers that began with the same seed draw different numbers."""
    for state, value in zip(seed_states(model), numpy_of(seed_states(model)), strict=True):
        moved = value.copy()
        moved.flat[0] += rank * 1_000_003 % 2**31
        state.assign(moved)
