"""Styles: how one module is cut, and cutting it.

A style is a word and a number of blocks. `cut_module` cuts a module's parameters (and a norm's
buffers) in place, in the objects that optimizers and tied modules already refer to, and changes
its class; `undo` puts everything back if probing finds that the result differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model_parallel.parts.layout import Part
from paceline.model_parallel.tensor.attention import CutAttention
from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.layers import (
    CLASSES,
    CONVOLUTIONS,
    Place,
)

WORDS = ("column", "row", "embedding", "vocabulary", "attention", "norm", "replicate")
CLASSES[nn.MultiheadAttention, "attention"] = CutAttention


@dataclass(frozen=True)
class Style:
    """How a module is cut."""

    word: str
    blocks: int = 1  # of the cut dimension; of each, every process has a piece

    def __str__(self) -> str:
        return self.word if self.blocks == 1 else f"{self.word}, {self.blocks} blocks"


def cut_dims(module: nn.Module, style: Style) -> dict[str, tuple[int, int]]:
    """Return dimension and blocks for each parameter and buffer that the style cuts."""
    if style.word == "row":
        return {"weight": (1, style.blocks)}
    if style.word == "attention":
        named = {name: (0, 1) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
        named |= {name: (0, 3) for name in ("in_proj_weight", "in_proj_bias")}
        named["out_proj.weight"] = (1, 1)
        return {name: cut for name, cut in named.items() if _find(module, name) is not None}
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: (0, style.blocks) for name, tensor in own if tensor.ndim > 0}


def indivisible(module: nn.Module, style: Style, count: int) -> tuple[int, str] | None:
    """Return the size that does not divide, and what it is; None if all do."""
    sizes: dict[str, tuple[str, str]] = {
        "column": ("out_channels", "output channels")
        if isinstance(module, CONVOLUTIONS)
        else ("out_features", "output features (rows)"),
        "row": ("in_channels", "input channels")
        if isinstance(module, CONVOLUTIONS)
        else ("in_features", "input features (columns)"),
        "vocabulary": ("out_features", "output features (rows)"),
        "embedding": ("num_embeddings", "rows"),
        "attention": ("num_heads", "heads"),
        "norm": ("num_features", "channels"),
    }
    attribute, words = sizes[style.word]
    size = int(getattr(module, attribute))
    return None if size % (count * style.blocks) == 0 else (size, words)


def cut_class(module: nn.Module, word: str) -> type[nn.Module] | None:
    """Return the class of the cut module; None if there is no such style for it."""
    if isinstance(module, CONVOLUTIONS) and module.groups != 1:
        return None
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return None
    if isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS)):
        plain = {"weight", "bias"} >= module._parameters.keys() >= {"weight"}
        if not plain:  # weight_norm and the like compute their weight
            return None
    return CLASSES.get((type(module), word))


class Cutting:
    """Cuts modules, remembers what they were until `keep`, and which parts parameters became."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._undo: list[Callable[[], None]] = []
        self._done: dict[int, Part] = {}  # parameters of this cutting: tied ones are cut once

    def cut_module(self, place: Place, module: nn.Module, style: Style) -> None:
        """Cut a module in place."""
        for param_name, (dim, blocks) in cut_dims(module, style).items():
            tensor = _find(module, param_name)
            if id(tensor) not in self._done:
                self._cut(tensor, dim, blocks)
        was, becomes = type(module), cut_class(module, style.word)
        assert becomes is not None, f"{was.__name__} has no style {style.word}"
        module.__class__ = becomes
        module.place = place  # type: ignore[assignment]

        def restore() -> None:
            module.__class__ = was
            del module.place

        self._undo.append(restore)

    def part_of(self, param: Tensor) -> Part | None:
        """Return the part that a parameter has become."""
        return self._done.get(id(param))

    def undo(self) -> None:
        """Put everything back."""
        for step in reversed(self._undo):
            step()
        self._undo.clear()
        self._done.clear()

    def _cut(self, tensor: Tensor, dim: int, blocks: int) -> None:
        one = self._axis.slice(dim, blocks)
        whole = tensor.data
        self._done[id(tensor)] = Part(tuple(whole.shape), (one,))
        tensor.data = one.of(whole).clone(memory_format=torch.contiguous_format)
        tensor.grad = None

        def restore() -> None:
            tensor.data = whole
            tensor.grad = None

        self._undo.append(restore)


def _find(module: nn.Module, name: str) -> Any:
    for step in name.split("."):
        module = getattr(module, step)
    return module
