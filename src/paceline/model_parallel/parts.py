"""Parts: what of each parameter of the whole model a process holds.

A part is cut out of the whole by slices, one after the other (first for tp, then for fsdp), so that
it can be put back, and cut in another way for another mesh. Names are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class Slice:
    """One of `count` pieces along a dimension, as torch.chunk cuts them (the last may be smaller).

    `blocks`: the dimension is that many blocks of equal size, and of each there is a piece (the
    rows of q, k and v in one matrix).
    """

    dim: int
    index: int
    count: int
    blocks: int = 1

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the piece; a view if it is in one block."""
        pieces = [self._piece(block) for block in whole.chunk(self.blocks, self.dim)]
        return pieces[0] if self.blocks == 1 else torch.cat(pieces, self.dim)

    def put(self, whole: torch.Tensor, piece: torch.Tensor) -> None:
        """Write the piece to its place in the whole."""
        pieces = piece.chunk(self.blocks, self.dim)
        for block, values in zip(whole.chunk(self.blocks, self.dim), pieces, strict=True):
            self._piece(block).copy_(values)

    def _piece(self, block: torch.Tensor) -> torch.Tensor:
        length = block.shape[self.dim]
        size = -(-length // self.count)
        start = min(self.index * size, length)
        return block.narrow(self.dim, start, min(size, length - start))


@dataclass(frozen=True)
class Part:
    """What of one parameter a process holds; without slices: all of it."""

    shape: tuple[int, ...]  # of the whole
    slices: tuple[Slice, ...] = ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Cut this part out of the whole."""
        for one in self.slices:
            whole = one.of(whole)
        return whole

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this part to its place in the whole."""
        if not self.slices:
            whole.copy_(part)
            return
        # From the innermost: what a slice was cut from may be a copy, which is put back in turn.
        wholes = [whole]
        for one in self.slices[:-1]:
            wholes.append(one.of(wholes[-1]))
        for one, around in zip(reversed(self.slices), reversed(wholes), strict=True):
            one.put(around, part)
            part = around

    def then(self, one: Slice) -> Part:
        """Return the part that a further slice leaves."""
        return Part(self.shape, (*self.slices, one))


@dataclass
class Held:
    """A parameter that a process holds a part of."""

    param: nn.Parameter  # the part, as a plain tensor
    part: Part
    counts: bool = True  # for norms and sums over the unit: nobody else counts the same numbers


@dataclass
class Holding:
    """What one process holds of the whole model, by the names of the whole model's parameters."""

    held: dict[str, Held] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Held]]:
        return iter(self.held.items())

    @property
    def num_bytes(self) -> int:
        """How large what is held is."""
        return sum(h.param.numel() * h.param.element_size() for _, h in self)
