"""Running a model at set-up without leaving traces: evaluation mode, random numbers put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

# In evaluation torch's encoders read their layers' weights and call fused kernels; with these
# settings they call their modules, as in training.
_FUSED: list[tuple[type[nn.Module], str, Any]] = [
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
]


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and a kept random state within the block; no fused inference layers."""
    training = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    fused = unfuse(model)
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        for module, was in training.items():
            module.training = was
        for module, attribute, value in fused:
            setattr(module, attribute, value)
        with torch.no_grad():
            for buffer, values in buffers.items():
                buffer.copy_(values)


def unfuse(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Let torch's encoders call their modules in evaluation too; return what was set before."""
    before = []
    for module in model.modules():
        for kind, attribute, value in _FUSED:
            if isinstance(module, kind):
                before.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, value)
    return before


class Calls:
    """Other forwards for some modules within a block, and a note of every module's call."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        patches: Mapping[str, Callable[..., Any] | None],
        note: Callable[[str], None],
    ) -> None:
        self._modules, self._patches, self._note = modules, patches, note
        self._hooks: list[Any] = []
        self._patched: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> None:
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_pre_hook(self._noter(name)))
            patch = self._patches.get(name)
            if patch is not None:
                self._patched.append((module, module.__dict__.get("forward")))
                module.forward = patch

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, own in self._patched:
            del module.forward
            if own is not None:
                module.forward = own

    def _noter(self, name: str) -> Callable[..., None]:
        def noted(module: nn.Module, args: Any) -> None:
            del module, args
            self._note(name)

        return noted
