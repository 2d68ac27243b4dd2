"""`paceline.jax`: means over all workers inside of jit-compiled steps.

    grads = paceline.jax.mean(grads)                  inside or outside of jax.jit
    params = paceline.jax.broadcast(params)           once, before the first step

Importing this does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {"mean": "paceline.jax.trees", "broadcast": "paceline.jax.trees"}

__all__ = ["broadcast", "mean"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


if TYPE_CHECKING:
    from paceline.jax.trees import broadcast as broadcast
    from paceline.jax.trees import mean as mean
