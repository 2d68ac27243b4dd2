"""Means and broadcasts of JAX's trees of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.frameworks.averages import broadcast_values, group_for, mean_into, require_floating
from paceline.frameworks.requirement import require
from paceline.jax.host_call import Arrays, host_call
from paceline.runtime.job import world_size


def mean(tree: Any) -> Any:
    """Return the tree with the mean over all workers of each array.

    Works inside and outside of jax.jit, and with arrays of any framework on JAX (optax, Flax,
    Equinox). Every worker calls it with the same tree. Inside one jit, pass everything in one
    call, for example `loss, grads = paceline.jax.mean((loss, grads))`.
    """
    jax = require("jax")
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = [jax.numpy.asarray(leaf) for leaf in leaves]
    require_floating([array.dtype for array in arrays], "paceline.jax.mean")
    if world_size() > 1 and arrays:
        group_for("jax mean")  # outside of XLA's threads: errors of setting up are raised here
        arrays = host_call(_mean, arrays)
    return jax.tree_util.tree_unflatten(structure, arrays)


def _mean(inputs: Arrays, outputs: Arrays) -> None:
    mean_into(group_for("jax mean"), inputs, outputs)


def broadcast(tree: Any, root: int = 0) -> Any:
    """Return the tree with the arrays of one worker. Outside of jax.jit; leaves that are no arrays
    stay as they are."""
    jax = require("jax")
    leaves, structure = jax.tree_util.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    values = broadcast_values(group_for("jax"), [np.asarray(leaves[i]) for i in places], root)
    for place, value in zip(places, values, strict=True):
        is_jax = isinstance(leaves[place], jax.Array)
        leaves[place] = jax.numpy.asarray(value) if is_jax else value
    return jax.tree_util.tree_unflatten(structure, leaves)
