"""Which modules of a model are layers, that is, are never cut.

Outside in: the model itself is opened (its forward is read), and so is what stands around blocks: a
container (Sequential, ModuleList, ModuleDict), and a module that holds a container of modules which
have submodules themselves (an encoder with its list of blocks). All else is a layer: the elements
of containers, and modules without such containers. A container inside of an element is opened only
if it holds blocks too (a Sequential of Sequentials of blocks).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def opened_modules(model: nn.Module, leaves: Collection[str], inside: Iterable[str]) -> set[str]:
    """Return the names of the modules whose forward is read, the model ("") among them.

    `leaves` stay closed whatever they are; modules around the names in `inside` are opened.
    """
    opened = {""}
    _open_children(model, "", opened, in_container=isinstance(model, CONTAINERS))
    for name in inside:
        parts = name.split(".")
        opened.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return {name for name in opened if not _is_within(name, leaves)}


def _open_children(module: nn.Module, prefix: str, opened: set[str], *, in_container: bool) -> None:
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        is_container = isinstance(child, CONTAINERS)
        if in_container:
            is_open = is_container and _holds_blocks(child)
        else:
            is_open = is_container or _holds_blocks(child)
        if is_open and not isinstance(child, torch.jit.ScriptModule):
            opened.add(name)
            _open_children(child, name, opened, in_container=is_container)


def _holds_blocks(module: nn.Module) -> bool:
    """Say whether a container somewhere in the module has an element with submodules."""
    return any(
        isinstance(one, CONTAINERS) and any(_is_composite(element) for element in one.children())
        for one in module.modules()
    )


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_within(name: str, leaves: Collection[str]) -> bool:
    return any(name == leaf or name.startswith(f"{leaf}.") for leaf in leaves)
