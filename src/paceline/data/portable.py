"""Indices on their way to other workers, as plain data."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError


def portable(unit: Any) -> Any:
    """Turn an index into plain data: numbers, strings, lists of them, and tuples as dicts."""
    if isinstance(unit, (int, str)):
        return unit
    if isinstance(unit, (torch.Tensor, np.ndarray)) and unit.ndim > 0:
        return unit.tolist()
    if isinstance(unit, list):
        if not unit:
            raise UsageError("the batch sampler gave an empty batch; leave such batches out")
        return [portable(index) for index in unit]
    if isinstance(unit, tuple):
        return {"tuple": [portable(index) for index in unit]}
    try:
        return operator.index(unit)
    except TypeError:
        raise UsageError(
            f"the sampler gave an index of type {type(unit).__name__}, which cannot be sent to the"
            " other ranks; use numbers, strings, or lists and tuples of them"
        ) from None


def restored(unit: Any) -> Any:
    """Turn plain data into the index again."""
    if isinstance(unit, dict):
        return tuple(restored(index) for index in unit["tuple"])
    return [restored(index) for index in unit] if isinstance(unit, list) else unit
