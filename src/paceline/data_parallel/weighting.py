"""Gradients weighted by the samples of the batch that they come from (see contribution.py).

Each gradient is multiplied as it arrives at its parameter, before it is added to what is there: so
batches of different sizes may also be accumulated. While all batches weigh the same, nothing is
done and nothing is hooked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle


class Weighting:
    """Scales the gradients of some parameters."""

    def __init__(self) -> None:
        self._weight = 1.0
        self._params: Sequence[torch.nn.Parameter] = ()
        self._hooks: list[RemovableHandle] = []

    @property
    def weight(self) -> float:
        """What the gradients of this pass are multiplied with."""
        return self._weight

    def cover(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Scale the gradients of these, from now on."""
        self._params = params
        self.set(self._weight)

    def set(self, weight: float) -> None:
        """Scale the gradients of the following backward passes."""
        self._weight = weight
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        if weight != 1.0:
            self._hooks = [p.register_hook(self._scale) for p in self._params if p.requires_grad]

    def _scale(self, grad: torch.Tensor) -> torch.Tensor:
        # Zero times a gradient would keep its infinities.
        return grad * self._weight if self._weight else torch.zeros_like(grad)
