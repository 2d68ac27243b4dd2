"""Blocks: the pieces of a model that are gathered, or recomputed, one at a time.

A block is an element of an nn.ModuleList or nn.Sequential that has parameters: the layers of a
transformer, the units of a residual network. Blocks are looked for from the outside, and what is
inside one is not looked at, except in one that holds more than half of the model: that is rather
the body of the model, and has blocks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by name, inner ones before those around them; the model is none itself."""
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
