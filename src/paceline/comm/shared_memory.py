"""Tensors in engine memory: shared with all processes of the host, so collectives need no copy."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from paceline import _core
from paceline.comm.group import Group
from paceline.comm.tensors import num_bytes
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


def zeros_in_large_pages(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of this process alone, in memory that is cheap to walk through.

    Where the kernel gives large pages only to who asks for them, torch.zeros() has small ones.
    """
    memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a wish: a kernel without large pages knows no such thing
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[:size]


class HostTensor:
    """One tensor that all workers of a host share, seen in two ways.

    What one worker writes to `shared`, all see in both, without any order but that of the group's
    collectives. What it writes to `private` it sees alone, and only there, until it calls
    `discard()`; meanwhile pages that it wrote to do not follow changes of `shared`.
    """

    def __init__(
        self, memory: Any, view: _core.PrivateView, shape: Sequence[int], dtype: torch.dtype
    ):
        size = num_bytes(shape, dtype)
        flat, seen = torch.from_numpy(memory), torch.from_numpy(view.memory())
        self.shared: torch.Tensor = flat[:size].view(dtype).view(tuple(shape))
        self.private: torch.Tensor = seen[:size].view(dtype).view(tuple(shape))
        self._view = view

    def is_changed(self) -> bool:
        """Say whether this worker has written to `private` since the last `discard()`."""
        return self._view.changed()

    def discard(self) -> None:
        """Forget what this worker wrote to `private`."""
        self._view.discard()


def allocate_on_host(
    engine: _core.Engine, host: Group, shape: Sequence[int], dtype: torch.dtype
) -> HostTensor:
    """Return an uninitialised tensor that all members of `host`, a group on one host, share.

    Collective. The memory lives until the last member has dropped it.
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
    owner = host.ranks[0]
    if memory is None:
        memory = engine.memory_of_peer(owner, segment, offset, size)
    view = engine.private_view(owner, segment, offset, size)
    host.barrier()  # nobody drops the memory before all have mapped it
    return HostTensor(memory, view, shape, dtype)
