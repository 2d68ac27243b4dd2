"""Which parts of a flat tensor a codec is used on.

Small tensors (biases, norms) stay as they are: they are few bytes, and the ones that suffer most.
What is large and lies side by side is one SPAN, of which the codec knows nothing but its numbers;
between two tensors are a few zeros, so that each begins on a cache line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Segment(Protocol):
    """One tensor in a flat one."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def shape(self) -> torch.Size: ...


@dataclass(frozen=True)
class Span:
    """A range of elements."""

    start: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this part of a flat tensor."""
        return flat[self.start : self.start + self.count]


@dataclass(frozen=True)
class Layout:
    """One flat tensor: what is compressed of it, and what is not."""

    size: int
    first: int  # index of its first element in the whole model
    large: tuple[Span, ...]
    small: tuple[Span, ...]
    matrices: tuple[tuple[Span, torch.Size], ...]  # the large ones, one by one, with their shapes

    @property
    def num_small(self) -> int:
        """How many elements stay as they are."""
        return sum(span.count for span in self.small)

    def pack_small(self, values: torch.Tensor, small: torch.Tensor) -> None:
        """Write what stays as it is to `small`, one tensor after the other."""
        at = 0
        for span in self.small:
            small[at : at + span.count].copy_(span.of(values))
            at += span.count

    def unpack_small(self, small: torch.Tensor, out: torch.Tensor) -> None:
        """Write it to its places in `out`."""
        at = 0
        for span in self.small:
            span.of(out).copy_(small[at : at + span.count])
            at += span.count

    def wanted_size(self, values: torch.Tensor, residual: torch.Tensor) -> float:
        """Return the norm of what is to be compressed; 0 if it is not finite."""
        wanted = (span.of(values) + span.of(residual) for span in self.large)
        size = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in wanted))
        return size if math.isfinite(size) else 0.0


def plan(segments: Sequence[Segment], size: int, first: int, min_elements: int) -> Layout:
    """Divide a flat tensor; a pure function of what all workers know."""
    large: list[Span] = []
    small: list[Span] = []
    matrices: list[tuple[Span, torch.Size]] = []
    is_open = False  # the last tensor was a large one
    for segment in segments:
        span = Span(segment.start, segment.count)
        if segment.count < max(1, min_elements):
            small.append(span)
            is_open = False
            continue
        matrices.append((span, segment.shape))
        if is_open:
            last = large.pop()
            span = Span(last.start, span.start + span.count - last.start)
        large.append(span)
        is_open = True
    return Layout(size, first, tuple(large), tuple(small), tuple(matrices))
