"""Blocks: the modules of a model that are gathered, or recomputed, one at a time.

A block is an element of an nn.ModuleList or nn.Sequential that has parameters: the layers of a
transformer, the units of a residual network. The search goes from the outside in and stops at a
block, except at one that holds more than half of the model: that is the body of the model, and has
blocks of its own.

Recomputing keeps only the inputs of blocks, and computes a block again when backward reaches it.
The memory of activations becomes that of one block and of the blocks' inputs, for one more forward
pass. Random numbers (dropout) are the same in both passes. Names of parameters and modules do not
change: only the block's `forward` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by name, inner ones before outer ones; the model itself is not a block."""
    found: dict[str, nn.Module] = {}
    for name, block in _blocks(model, "", num_elements(model)):
        # One module under several names is one block.
        if all(block is not other for other in found.values()):
            found[name] = block
    return found


def num_elements(module: nn.Module) -> int:
    """Count the elements of all parameters."""
    return sum(param.numel() for param in module.parameters())


def _blocks(module: nn.Module, prefix: str, num_all: int) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_element = isinstance(module, (nn.ModuleList, nn.Sequential))
        is_block = is_element and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        # A Sequential in a Sequential only groups its elements.
        is_block = is_block and type(child) is not nn.Sequential and num_elements(child) > 0
        if not is_block or num_elements(child) > num_all / 2:
            yield from _blocks(child, f"{path}.", num_all)
        if is_block:
            yield path, child


def recompute(model: nn.Module) -> list[str]:
    """Let backward recompute the blocks; return their names. Call it before or after sharding."""
    blocks = blocks_of(model)
    # An outer block is the body of the model: only the inner ones are recomputed.
    found = set(blocks.values())
    inner = {n: b for n, b in blocks.items() if not any(c in found for c in _below(b))}
    if not inner:
        raise UsageError(
            f"recompute: {type(model).__name__} has no blocks (elements of an nn.ModuleList or"
            " nn.Sequential that have parameters), so there is nothing to recompute; put its layers"
            " into one, or use activations='keep'"
        )
    for block in inner.values():
        block.forward = functools.partial(_forward, block.forward)
    return list(inner)


def _below(block: nn.Module) -> Iterator[nn.Module]:
    return (module for module in block.modules() if module is not block)


def _forward(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True, **options)
