"""The part of a model that a process holds, as a module without code.

Data parallelism needs parameters and buffers with the names of the whole model, and no forward.
Modules share their dictionary of buffers with it, so that whatever is put in place of one is seen
by both.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


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
