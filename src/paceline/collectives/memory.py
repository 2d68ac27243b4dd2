"""Tensors in engine memory: shared with all processes of the host, so collectives need no copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline import _core
from paceline.collectives.group import Group
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


def allocate_on_host(
    engine: _core.Engine, host: Group, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return one tensor that all members of `host`, a group on one host, share. Collective.

    It is uninitialised. What one member writes, all see, without any order but that of the group's
    collectives. The memory lives until the last member has dropped it.
    """
    size = max(num_bytes(shape, dtype), 1)
    memory: Any = None
    problem: SharedMemoryError | None = None
    if host.rank == 0:
        try:
            memory = engine.allocate(size, apart=True)
        except SharedMemoryError as error:  # the others wait for an answer
            problem = error
    where = torch.zeros(2, dtype=torch.int64)
    if memory is not None:
        where = torch.tensor(engine.locate(memory.ctypes.data, size))
    host.broadcast(where)
    segment, offset = where.tolist()
    if segment == 0:
        raise problem or SharedMemoryError(
            f"rank {host.ranks[0]} could not allocate {size} bytes for all workers of this host;"
            " its own error says why"
        )
    if memory is None:
        memory = engine.memory_of_peer(host.ranks[0], segment, offset, size)
    flat: torch.Tensor = torch.from_numpy(memory)
    return flat[: num_bytes(shape, dtype)].view(dtype).view(tuple(shape))
