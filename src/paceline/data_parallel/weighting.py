"""Gradients weighted by the samples of the batch that they come from (see contribution.py), and
divided by the scale of the loss (see loss_scaling.py).

Each gradient is multiplied as it arrives at its parameter, before it is added to what is there: so
batches of different sizes may also be accumulated, and whoever sees gradients later, the script,
other workers, servers or what a pace keeps of them, sees them as they are. While all batches weigh
the same and no loss is scaled, nothing is done and nothing is hooked.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from paceline.data_parallel import loss_scaling
from paceline.data_parallel.direct import is_going_to_accumulate

_all: weakref.WeakSet[Weighting] = weakref.WeakSet()


class Weighting:
    """Scales the gradients of some parameters."""

    def __init__(self) -> None:
        self.weight = 1.0  # what the gradients of this pass are multiplied with
        self._params: Sequence[torch.nn.Parameter] = ()
        self._hooks: list[RemovableHandle] = []
        self.is_in_loss = False  # see leave_to_loss
        _all.add(self)

    def cover(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Scale the gradients of these, from now on."""
        self._params = params
        self.renew()

    def set(self, weight: float) -> None:
        """Scale the gradients of the following backward passes."""
        if weight != self.weight:
            self.weight = weight
            self.renew()

    def leave_to_loss(self) -> None:
        """Hook nothing: the loss is multiplied with the weight, because gradients do not come to
        these parameters by autograd."""
        if not self.is_in_loss:
            self.is_in_loss = True
            self.renew()

    def close(self) -> None:
        """Let go of the parameters."""
        self.cover(())

    def renew(self) -> None:
        """Hook what has to be hooked."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        is_needed = self.weight != 1.0 or loss_scaling.is_in_use()
        if is_needed and not self.is_in_loss:
            self._hooks = [
                p.register_hook(partial(self._scale, get_gradient_edge(p).node))
                for p in self._params
                if p.requires_grad
            ]

    def _scale(self, accumulate: Any, grad: torch.Tensor) -> torch.Tensor:
        scale = loss_scaling.scale_of_pass()
        if scale != 1.0 and not is_going_to_accumulate(accumulate):
            scale = 1.0  # torch.autograd.grad(scaled loss, ...): the script divides by itself
        if self.weight == scale:
            return grad
        # Zero times a gradient would keep its infinities.
        return grad * (self.weight / scale) if self.weight else torch.zeros_like(grad)


def expect_scaled_losses() -> None:
    """Let all models that are distributed already, and later ones, divide by the loss's scale."""
    if not loss_scaling.is_in_use():
        loss_scaling.begin_use()
        for weighting in _all:
            weighting.renew()
