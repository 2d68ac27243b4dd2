"""model.train_step(x, y): one batch, the same words for every mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from paceline.data_parallel.hooks import UncopiedHook
from paceline.errors import UsageError

Loss = Callable[..., torch.Tensor]


def as_inputs(inputs: Any) -> tuple[Any, ...]:
    """Return what a model is called with: several inputs are given as a tuple."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def backward(model: nn.Module, loss: Loss | None, inputs: Any, targets: Any) -> torch.Tensor:
    """Compute the gradients of one batch the ordinary way; return its loss."""
    if loss is None:
        raise UsageError(
            "train_step: which loss? pass it: distribute(..., loss=torch.nn.functional"
            ".cross_entropy); or write the loop with model(x), backward() and optimizer.step()"
        )
    output = model(*as_inputs(inputs))
    found = loss(output) if targets is None else loss(output, targets)
    found.backward()
    return found.detach()


def in_copies(*_: Any) -> NoReturn:
    """Stand in for what a copy of a distributed model does not have."""
    raise UsageError(
        "train_step: this is a copy of the model that was distributed, and a plain one"
    )


class TrainStep:
    """Gives a model that every worker has whole its `train_step`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None,
        max_norm: float | None,
    ) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._loss, self._max_norm = loss, max_norm
        object.__setattr__(model, "train_step", UncopiedHook(self.run, in_copies))
        forward_backward = UncopiedHook(self.forward_backward, in_copies)
        object.__setattr__(model, "forward_backward", forward_backward)

    def run(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Train with one batch: gradients, clipping, the optimizer's step; return its loss."""
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "who calls this has them"
        optimizer.zero_grad()
        loss = self.forward_backward(inputs, targets)
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self._max_norm)
        optimizer.step()
        return loss

    def forward_backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Compute the gradients of one batch; return its loss."""
        model = self._model()
        assert model is not None, "who calls this has it"
        return backward(model, self._loss, inputs, targets)
