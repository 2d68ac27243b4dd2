"""Shard layout: which slice of each parameter of the full model a process holds.

A shard is cut out of the full tensor by slices, one after the other (first for tp, then for fsdp).
So it can be written back, and cut in another way for another mesh. Names are those of the full
model.

Data parallelism trains the shards through a SKELETON: parameters and buffers with the names of the
full model, and no forward. It shares its dictionaries of buffers with the model's modules, so that
both see a buffer that is replaced. The optimizer stays the object that the script created: in its
param groups and its state, each full parameter is replaced by its local shard, or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import nn

from paceline.data_parallel.update.ownership import is_elementwise
from paceline.errors import UsageError


@dataclass(frozen=True)
class Slice:
    """One of `count` slices along a dimension, as torch.chunk cuts them (the last may be smaller).

    `blocks`: the dimension consists of that many blocks of equal size, and each block is sliced
    (the rows of q, k and v in one matrix).
    """

    dim: int
    index: int
    count: int
    blocks: int = 1

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the slice of a full tensor; a view if there is one block."""
        slices = [self._slice(block) for block in full.chunk(self.blocks, self.dim)]
        return slices[0] if self.blocks == 1 else torch.cat(slices, self.dim)

    def put(self, full: torch.Tensor, values: torch.Tensor) -> None:
        """Write the slice's values into the full tensor."""
        for block, own in zip(
            full.chunk(self.blocks, self.dim), values.chunk(self.blocks, self.dim), strict=True
        ):
            self._slice(block).copy_(own)

    def _slice(self, block: torch.Tensor) -> torch.Tensor:
        length = block.shape[self.dim]
        size = -(-length // self.count)
        start = min(self.index * size, length)
        return block.narrow(self.dim, start, min(size, length - start))


@dataclass(frozen=True)
class SliceSpec:
    """Which shard of one tensor a process holds; without slices: the full tensor."""

    shape: tuple[int, ...]  # of the full tensor
    slices: tuple[Slice, ...] = ()

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the shard of a full tensor."""
        for one in self.slices:
            full = one.of(full)
        return full

    def put(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Write the shard into the full tensor."""
        if not self.slices:
            full.copy_(shard)
            return
        # From the innermost slice: what it was cut from may be a copy, which is written back next.
        sources = [full]
        for one in self.slices[:-1]:
            sources.append(one.of(sources[-1]))
        for one, source in zip(reversed(self.slices), reversed(sources), strict=True):
            one.put(source, shard)
            shard = source

    def then(self, one: Slice) -> SliceSpec:
        """Return the spec of the shard that a further slice leaves."""
        return SliceSpec(self.shape, (*self.slices, one))

    def plain_slices(self) -> list[list[int]]:
        """Return the slices as plain data: what `Slice(*numbers)` takes."""
        return [list(astuple(one)) for one in self.slices]


@dataclass
class LocalShard:
    """The shard of one tensor of the full model that this process holds."""

    tensor: torch.Tensor  # plain; of a parameter: the nn.Parameter that is trained
    spec: SliceSpec
    is_counted: bool = True  # in norms and sums over the unit: no other process counts it


LocalShards = dict[str, LocalShard]  # by the names of the full model's parameters


class Skeleton(nn.Module):
    """Parameters and buffers by the names of the full model."""


def make_skeleton(
    model: nn.Module, shards: LocalShards, aliases: Mapping[str, str], buffers: set[str] | None
) -> Skeleton:
    """Return a skeleton of the model with these shards and these buffers (None: all).

    `aliases`: further names of tied parameters.
    """
    root = Skeleton()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        names = {own: aliases.get(prefix + own, prefix + own) for own in module._parameters}
        params = {own: shards[name].tensor for own, name in names.items() if name in shards}
        kept = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffers is None or prefix + name in buffers
        }
        if not params and not kept:
            continue
        bare = _submodule(root, path)
        if len(kept) == len(module._buffers):
            bare._buffers = module._buffers
        else:
            bare._buffers.update(kept)
        bare._parameters.update(params)
        bare._non_persistent_buffers_set = module._non_persistent_buffers_set
    return root


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """Return the submodule of that path; create what is missing."""
    for name in path.split(".") if path else ():
        if name not in root._modules:
            root.add_module(name, nn.Module())
        found = root._modules[name]
        assert found is not None
        root = found
    return root


def find_optimizer_problem(optimizer: torch.optim.Optimizer, what: str) -> str | None:
    """Return why an optimizer cannot work on shards of matrices; None: it can."""
    if is_elementwise(optimizer):
        return None
    return (
        f"{type(optimizer).__name__} needs full parameters, and {what} shards them; use an"
        " optimizer that treats every element by itself (SGD, Adam, AdamW ...), or only pp and dp"
    )


def shard_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], shards: LocalShards
) -> None:
    """Replace the full model's parameters in an optimizer by the local shards.

    A param group without local shards stays, with no parameters: schedulers set learning rates by
    position.
    """
    for number, group in enumerate(optimizer.param_groups):
        local: list[torch.Tensor] = []
        for param in group["params"]:
            if param not in names:
                raise UsageError(
                    f"param group {number} of the optimizer has a parameter of shape"
                    f" {list(param.shape)} that the model does not have; create the optimizer from"
                    " model.parameters() of the model that you pass"
                )
            state = optimizer.state.pop(param, None)
            shard = shards.get(names[param])
            if shard is None:
                continue
            local.append(shard.tensor)
            if state:
                optimizer.state[shard.tensor] = {k: _shard(v, shard) for k, v in state.items()}
        group["params"] = local


def _shard(value: object, shard: LocalShard) -> object:
    if isinstance(value, torch.Tensor) and tuple(value.shape) == shard.spec.shape:
        return shard.spec.of(value).clone()
    return value
