"""Call watchers before every backward pass, with the loss.

`loss.backward()` and `torch.autograd.backward(loss)` both go through the latter, which is replaced
in this process. A GradScaler multiplies the loss first; the product remembers the loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ATTRIBUTE = "_paceline_loss"

Watcher = Callable[[torch.Tensor | None], None]  # the sum of the losses; None: there is no scalar

_watchers: list[Watcher] = []


def watch_backward(watcher: Watcher) -> None:
    """Call a function before each backward pass of this process from now on."""
    if not _watchers:
        _replace()
    _watchers.append(watcher)


def _replace() -> None:
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale

    def watched(tensors: Any, *arguments: Any, **named: Any) -> None:
        loss = _loss_of(tensors)
        for watcher in _watchers:
            watcher(loss)
        backward(tensors, *arguments, **named)

    def remembering(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
            setattr(scaled, _ATTRIBUTE, outputs.detach())
        return scaled

    torch.autograd.backward = watched
    torch.amp.GradScaler.scale = remembering  # type: ignore[method-assign]


def _loss_of(tensors: Any) -> torch.Tensor | None:
    listed: Sequence[Any] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    scalars = [
        getattr(one, _ATTRIBUTE, one).detach()
        for one in listed
        if isinstance(one, torch.Tensor) and one.numel() == 1
    ]
    return sum(one.reshape(()).float() for one in scalars) if scalars else None  # type: ignore[return-value]
