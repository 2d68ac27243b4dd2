"""The variables of a Keras model and its optimizer, on any backend, broadcast by name."""

from __future__ import annotations

from typing import Any

from paceline.horovod import arrays
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.keras.variables import assign, numpy_of, seed_states


def model_variables(model: Any, optimizer: Any) -> list[Any]:
    """Return what all ranks have in common: not the seeds, so that dropout differs."""
    state = list(optimizer.variables) if optimizer is not None and optimizer.built else []
    own = {id(seed) for seed in seed_states(model)}
    return [variable for variable in [*model.variables, *state] if id(variable) not in own]


def broadcast_variables(
    variables: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the root's values of keras.Variables. They are matched by their order."""
    variables = list(variables)
    base = process_set.next_name("broadcast_variables")
    names = [f"{base}.{number}" for number in range(len(variables))]
    values = arrays.broadcast_all(list(numpy_of(variables)), root_rank, names, process_set)
    assign(variables, values)


def broadcast_model(
    model: Any, optimizer: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give every rank the root's weights and optimizer state."""
    broadcast_variables(model_variables(model, optimizer), root_rank, process_set)
