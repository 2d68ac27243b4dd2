"""What the kernels of compression have in common: draws, checks of memory, work in several threads.

The kernels are in blocks.py (fewer bits of every number), sparse_format.py (fewer numbers) and
shared_scales.py. Flat, contiguous tensors of the CPU in and out; numbers are float32, payloads
uint8, indices int32. Results do not depend on `threads`, nor on whether the processor has AVX2.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from paceline.errors import UsageError

_SLICE_AT_LEAST = 1 << 16  # elements that are worth a thread


@dataclass(frozen=True)
class Draw:
    """A random number for every element of a tensor, without a message: the same wherever these
    three are known."""

    seed: int
    step: int
    first: int = 0  # index of the element that its first number belongs to

    def at(self, offset: int) -> Draw:
        """Return the numbers from so many elements on."""
        return Draw(self.seed, self.step, self.first + offset)

    @property
    def parts(self) -> tuple[int, int, int]:
        """What the engine is told."""
        return self.seed, self.step, self.first


def require(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int | None = None) -> None:
    """Refuse a tensor that the engine would misread."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        found = f"{'a contiguous' if tensor.is_contiguous() else 'a strided'} tensor"
        raise UsageError(
            f"{name}: expected contiguous memory of the CPU, got {found} on {tensor.device}"
        )
    if tensor.dtype != dtype:
        raise UsageError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if size is not None and tensor.numel() != size:
        raise UsageError(f"{name}: expected {size} elements, got {tensor.numel()}")


def require_residual(residual: torch.Tensor | None, size: int) -> int:
    """Return the address of a residual of float32; 0 when there is none."""
    if residual is None:
        return 0
    require("residual", residual, torch.float32, size)
    return residual.data_ptr()


def require_threads(threads: int) -> None:
    """Refuse numbers of threads that are none."""
    if threads < 1:
        raise UsageError(f"threads: expected at least 1, got {threads}")


def in_slices(count: int, block: int, threads: int, run: Callable[[int, int], None]) -> None:
    """Call `run(begin, end)` for slices of `count` elements that begin at blocks' borders.

    The first slice runs here, the others in threads. When one fails, its error is raised after all
    have ended.
    """
    require_threads(threads)
    blocks = -(-count // block)
    slices = max(1, min(threads, blocks, count // _SLICE_AT_LEAST))
    borders = [min(count, block * (blocks * i // slices)) for i in range(slices + 1)]
    if slices == 1:
        return run(0, count)
    others = [_pool(os.getpid()).submit(run, borders[i], borders[i + 1]) for i in range(1, slices)]
    try:
        run(borders[0], borders[1])
    finally:
        for other in others:
            other.exception()  # memory must not go away under a thread that still uses it
    for other in others:
        other.result()


@cache
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the threads of this process: those of a parent did not survive the fork."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="paceline-compress")
