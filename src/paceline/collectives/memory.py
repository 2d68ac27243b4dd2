"""Tensors in engine memory: shared with all processes of the host, so collectives need no copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline import _core
from paceline.collectives.tensors import num_bytes
from paceline.errors import SharedMemoryError, UsageError


def allocate(engine: _core.Engine, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in engine memory; it is given back with its last reference.

    Raises SharedMemoryError when the machine cannot spare the pages.
    """
    size = num_bytes(shape, dtype)
    if any(length < 0 for length in shape):
        raise UsageError(f"engine memory: shape {list(shape)} has a negative length")
    if size >= 1 << 63:
        raise SharedMemoryError(f"engine memory: shape {list(shape)} would take {size:.1e} bytes")
    memory: Any = torch.from_numpy(engine.allocate(max(size, 1)))
    return memory[:size].view(dtype).view(tuple(shape))  # type: ignore[no-any-return]
