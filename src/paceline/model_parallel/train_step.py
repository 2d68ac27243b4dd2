"""model.train_step(x, y): train on one batch, with the same call on every mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from paceline.data_parallel.hooks import TRAINING_NAMES, UncopiedHook
from paceline.errors import UsageError

Loss = Callable[..., torch.Tensor]


def as_inputs(inputs: Any) -> tuple[Any, ...]:
    """Return the arguments of a model's call; several inputs are passed as a tuple."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def backward(model: nn.Module, loss: Loss | None, inputs: Any, targets: Any) -> torch.Tensor:
    """Compute the gradients of one batch the ordinary way; return its loss."""
    if loss is None:
        raise UsageError(
            "train_step needs a loss; pass it: distribute(..., loss=torch.nn.functional"
            ".cross_entropy); or write the loop with model(x), backward() and optimizer.step()"
        )
    output = model(*as_inputs(inputs))
    found = loss(output) if targets is None else loss(output, targets)
    found.backward()
    return found.detach()


def refuse_copies(*_: Any) -> NoReturn:
    """Raise UsageError: a copy of a distributed model does not have its methods."""
    raise UsageError(
        "train_step: this is a copy of the model that was distributed, and is not distributed"
        " itself; call train_step on the original"
    )


class TrainStep:
    """Adds `train_step` to a model that every worker holds in full."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None,
        max_norm: float | None,
    ) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._loss, self._max_norm = loss, max_norm
        for name, method in zip(TRAINING_NAMES, (self.run, self.forward_backward), strict=True):
            if not hasattr(type(model), name):  # else it is the script's, and keeps its meaning
                object.__setattr__(model, name, UncopiedHook(method, refuse_copies))

    def run(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Train with one batch: gradients, clipping, the optimizer's step; return its loss."""
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "the caller holds them"
        optimizer.zero_grad()
        loss = self.forward_backward(inputs, targets)
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self._max_norm)
        optimizer.step()
        return loss

    def forward_backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Compute the gradients of one batch; return its loss."""
        model = self._model()
        assert model is not None, "the caller holds it"
        return backward(model, self._loss, inputs, targets)
