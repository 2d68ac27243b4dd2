"""Parts: what of each parameter of the whole model a process holds.

A part is cut out of the whole by slices, one after the other (first for tp, then for fsdp), so that
it can be put back, and cut in another way for another mesh. Names are those of the whole model.

Data parallelism trains the part through a SKELETON: parameters and buffers with the names of the
whole model, and no forward. Modules share their dictionary of buffers with it, so that a buffer
that is replaced is seen by both. The optimizer stays the object that the script made: in its param
groups the whole parameters are replaced by the parts that are here, or left out, and so is their
state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.data_parallel.update.ownership import is_elementwise
from paceline.errors import UsageError


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


class Skeleton(nn.Module):
    """Parameters and buffers by the names of the whole model."""


def skeleton_of(
    model: nn.Module, params: Mapping[str, nn.Parameter], buffers: set[str] | None = None
) -> Skeleton:
    """Return the part of a model that has these parameters, and these buffers (None: all)."""
    root = Skeleton()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        mine = {n: params[prefix + n] for n in module._parameters if prefix + n in params}
        kept = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffers is None or prefix + name in buffers
        }
        if not mine and not kept:
            continue
        place = _place(root, path)
        if len(kept) == len(module._buffers):
            place._buffers = module._buffers
        else:
            place._buffers.update(kept)
        place._parameters.update(mine)
        place._non_persistent_buffers_set = module._non_persistent_buffers_set
    return root


def _place(root: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else ():
        if name not in root._modules:
            root.add_module(name, nn.Module())
        found = root._modules[name]
        assert found is not None
        root = found
    return root


def find_problem_with_cuts(optimizer: torch.optim.Optimizer, what: str) -> str | None:
    """Say why an optimizer cannot work on parts of matrices; None: it can."""
    if is_elementwise(optimizer):
        return None
    return (
        f"{type(optimizer).__name__} looks at whole parameters, and {what} cuts them: use an"
        " optimizer that treats every element by itself (SGD, Adam, AdamW ...), or only pp and dp"
    )


def use_parts(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], holding: Holding
) -> None:
    """Let an optimizer have the parts that are held in place of the whole model's parameters.

    A param group of which nothing is here stays, with no parameters: schedulers set rates by
    position.
    """
    for number, group in enumerate(optimizer.param_groups):
        mine: list[nn.Parameter] = []
        for param in group["params"]:
            if param not in names:
                raise UsageError(
                    f"param group {number} of the optimizer has a parameter of shape"
                    f" {list(param.shape)} that the model does not have; make the optimizer from"
                    " model.parameters() of the model that you pass"
                )
            state = optimizer.state.pop(param, None)
            held = holding.held.get(names[param])
            if held is None:
                continue
            mine.append(held.param)
            if state:
                optimizer.state[held.param] = {k: _cut(v, held) for k, v in state.items()}
        group["params"] = mine


def _cut(value: object, held: Held) -> object:
    if isinstance(value, torch.Tensor) and tuple(value.shape) == held.part.shape:
        return held.part.of(value).clone()
    return value
