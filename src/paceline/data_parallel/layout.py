"""Where parameters lie: which bucket, and at which place of its flat tensors.

Gradients become ready roughly in the reverse order of the parameters, so buckets are filled in that
order. The first one is small: the exchange can start early, while the rest of the backward pass
still runs. The last one is what nobody can hide, so it should not be large either.

Every parameter starts on a cache line. A parameter that is dense but not contiguous (channels_last)
keeps its strides: its place holds its memory, not its logical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LINE_BYTES = 64


@dataclass(frozen=True)
class Named:
    """A parameter and the name under which the model knows it."""

    name: str
    param: torch.nn.Parameter

    def __str__(self) -> str:
        return f"{self.name} {describe(self.param)}"


def describe(tensor: torch.Tensor) -> str:
    """Write a tensor's kind as 'float32[64, 10]'."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True)
class Place:
    """One parameter's part of a flat tensor, in elements."""

    named: Named
    start: int
    count: int

    @property
    def shape(self) -> torch.Size:
        """The parameter's."""
        return self.named.param.shape

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this part of a flat tensor in the parameter's shape and strides."""
        param = self.named.param
        return flat[self.start : self.start + self.count].as_strided(param.size(), param.stride())


def place(parameters: Sequence[Named]) -> tuple[list[Place], int]:
    """Put parameters of one dtype one behind the other; also return the size of the whole."""
    places: list[Place] = []
    end = 0
    for named in parameters:
        line = _LINE_BYTES // named.param.element_size()
        places.append(Place(named, end, named.param.numel()))
        end += -(-named.param.numel() // line) * line
    return places, end


def plan_buckets(
    parameters: Sequence[Named], bucket_bytes: int, first_bytes: int
) -> list[list[Named]]:
    """Cut the parameters into buckets, in the order in which their gradients will be ready.

    A bucket has one dtype and at most `bucket_bytes` (the first: `first_bytes`), unless a single
    parameter is larger. A pure function of the parameters: all workers make the same plan.
    """
    buckets: list[list[Named]] = []
    open_buckets: dict[torch.dtype, list[Named]] = {}
    sizes: dict[torch.dtype, int] = {}
    for named in reversed(parameters):
        dtype, size = named.param.dtype, named.param.numel() * named.param.element_size()
        limit = bucket_bytes if buckets else first_bytes
        if dtype in open_buckets and sizes[dtype] + size > limit:
            buckets.append(open_buckets.pop(dtype))
        if dtype not in open_buckets:
            open_buckets[dtype], sizes[dtype] = [], 0
        open_buckets[dtype].append(named)
        sizes[dtype] += size
    return buckets + list(open_buckets.values())


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements fill its memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
