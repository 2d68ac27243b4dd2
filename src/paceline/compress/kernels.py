"""Common parts of the compression kernels: random draws, checks of tensors, threads.

The kernels are in blocks.py (fewer bits per number), sparse_format.py (fewer numbers) and
sign_bits.py (signs). They work on flat, contiguous CPU tensors; numbers are float32, payloads
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
    """A pseudorandom number for every element of a tensor. Workers with equal fields get equal
    numbers without communication."""

    seed: int
    step: int
    first: int = 0  # index of the element of the first number

    def at(self, offset: int) -> Draw:
        """Return the draw whose first number is the one at this offset."""
        return Draw(self.seed, self.step, self.first + offset)

    @property
    def parts(self) -> tuple[int, int, int]:
        """The fields in the order of the engine's arguments."""
        return self.seed, self.step, self.first


def require(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int | None = None) -> None:
    """Raise UsageError for a tensor that the engine, which gets only its address, would misread."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        found = f"{'a contiguous' if tensor.is_contiguous() else 'a strided'} tensor"
        raise UsageError(
            f"{name}: expected a contiguous CPU tensor, got {found} on {tensor.device}"
        )
    if tensor.dtype != dtype:
        raise UsageError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if size is not None and tensor.numel() != size:
        raise UsageError(f"{name}: expected {size} elements, got {tensor.numel()}")


def require_residual(residual: torch.Tensor | None, size: int) -> int:
    """Return the address of a float32 residual; 0 if there is none."""
    if residual is None:
        return 0
    require("residual", residual, torch.float32, size)
    return residual.data_ptr()


def require_threads(threads: int) -> None:
    """Raise UsageError for less than one thread."""
    if threads < 1:
        raise UsageError(f"threads: expected at least 1, got {threads}")


def in_slices(count: int, block: int, threads: int, run: Callable[[int, int], None]) -> None:
    """Call `run(begin, end)` for slices of `count` elements that begin at block boundaries.

    The first slice runs in the calling thread, the others in a pool. If one fails, its error is
    raised after all slices have ended.
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
            other.exception()  # the tensors must outlive the threads that use them
    for other in others:
        other.result()


@cache
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the thread pool of this process; a parent's threads do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="paceline-compress")
