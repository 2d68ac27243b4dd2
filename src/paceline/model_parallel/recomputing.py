"""Recomputing: keep the inputs of blocks only, and compute a block again when backward reaches it.

The memory of activations becomes that of one block and of the blocks' inputs, for one more forward
pass. Random numbers (dropout) are the same in the second pass as in the first. Names of parameters
and modules stay as they are: only the block's `forward` is another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.model_parallel.blocks import blocks_of


def recompute(model: nn.Module, which: str = "blocks") -> list[str]:
    """Let blocks compute again in backward; return their names. Before or behind any cut."""
    if which != "blocks":
        raise UsageError(f"recompute {which!r}: it is 'blocks' that can be recomputed")
    blocks = blocks_of(model)
    # A block around others is the body of the model: it is those that are recomputed.
    found = set(blocks.values())
    inner = {n: b for n, b in blocks.items() if not any(c in found for c in _below(b))}
    if not inner:
        raise UsageError(
            f"recompute: {type(model).__name__} has no blocks (elements of an nn.ModuleList or"
            " nn.Sequential that have parameters), so there is nothing to recompute; put its layers"
            " into one, or leave activations as they are"
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
