"""Tensors in engine memory. All processes of the host share it, so collectives need no copy."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from paceline import _core
from paceline.comm.group import Group
from paceline.comm.tensors import num_bytes
from paceline.errors import SharedMemoryError, UsageError


def allocate(
    engine: _core.Engine, shape: Sequence[int], dtype: torch.dtype, *, apart: bool = False
) -> torch.Tensor:
    """Return an uninitialised tensor in engine memory; it is freed with its last reference.

    `apart`: on pages of its own, which can be registered with a device.

    Raises SharedMemoryError if the machine does not have the memory.
    """
    size = num_bytes(shape, dtype)
    if any(length < 0 for length in shape):
        raise UsageError(f"engine memory: shape {list(shape)} has a negative length")
    if size >= 1 << 63:
        raise SharedMemoryError(f"engine memory: shape {list(shape)} would take {size:.1e} bytes")
    memory: Any = torch.from_numpy(engine.allocate(max(size, 1), apart=apart))
    return memory[:size].view(dtype).view(tuple(shape))  # type: ignore[no-any-return]


def zeros_in_large_pages(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of zeros in private memory with large pages, which is fast to traverse.

    If the kernel gives large pages only on request (madvise), torch.zeros() has small pages.
    """
    memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # only a hint: a kernel without large pages refuses it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[:size]


class HostTensor:
    """A tensor that all workers of a host share, in two views.

    If one worker writes to `shared`, all workers see it in both views; only the group's collectives
    order these writes. If a worker writes to `private`, only this worker sees it, and only in
    `private`, until it calls `discard()`. Until then the pages it wrote to do not follow changes of
    `shared`.
    """

    def __init__(
        self,
        engine: _core.Engine,
        where: tuple[int, int, int],
        memory: Any,
        view: _core.PrivateView,
        shape: Sequence[int],
        dtype: torch.dtype,
    ):
        """`where` the memory is: rank, segment, offset."""
        self._engine, self._view, self._where = engine, view, where
        size = num_bytes(shape, dtype)
        flat, seen = torch.from_numpy(memory), torch.from_numpy(view.memory())
        self.shared: torch.Tensor = flat[:size].view(dtype).view(tuple(shape))
        self.private: torch.Tensor = seen[:size].view(dtype).view(tuple(shape))
        # Return whether this worker has written to `private` since the last `discard()`; undo what
        # it wrote. The engine's own methods, because training calls the first in every step.
        self.is_changed: Callable[[], bool] = view.changed
        self.discard: Callable[[], None] = view.discard

    def show(self, start: int, stop: int, where: tuple[int, int, int] | None) -> None:
        """Let `private` show other memory from byte `start` to `stop`: rank, segment, offset; None:
        `shared` again. What this worker has written there is dropped.

        Raises UsageError if that process has no such memory, or was forgotten.
        """
        if where is None:
            rank, segment, offset = self._where
            where = (rank, segment, offset + start)
        self._engine.show_in(self._view, start, *where, stop - start)


def allocate_on_host(
    engine: _core.Engine, host: Group, shape: Sequence[int], dtype: torch.dtype
) -> HostTensor:
    """Return an uninitialised tensor shared by all members of `host`, a group on one host.

    Collective. The memory is freed when the last member drops it.
    """
    size = max(num_bytes(shape, dtype), 1)
    memory: Any = None
    problem: SharedMemoryError | None = None
    if host.rank == 0:
        try:
            memory = engine.allocate(size, apart=True)
        except SharedMemoryError as error:  # raised below: the other members wait for the broadcast
            problem = error
    where = torch.zeros(2, dtype=torch.int64)
    if memory is not None:
        where = torch.tensor(engine.locate(memory.ctypes.data, size))
    host.broadcast(where)
    segment, offset = where.tolist()
    if segment == 0:
        raise problem or SharedMemoryError(
            f"rank {host.ranks[0]} could not allocate {size} bytes for all workers of this host;"
            " see the error of that rank"
        )
    owner = host.ranks[0]
    if memory is None:
        memory = engine.memory_of_peer(owner, segment, offset, size)
    view = engine.private_view(owner, segment, offset, size)
    host.barrier()  # no member drops the memory before all have mapped it
    return HostTensor(engine, (owner, segment, offset), memory, view, shape, dtype)
