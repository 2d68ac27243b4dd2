"""The loss of a batch: from `loss_fn(outputs, targets)`, or from a `step_fn(model, batch)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.job import current
from paceline.model_parallel.train_step import as_inputs


@dataclass(frozen=True)
class Measured:
    """What came out of one batch."""

    loss: torch.Tensor
    outputs: Any = None
    targets: Any = None
    has_outputs: bool = True


class Objective:
    """Computes losses, and refuses what is not one."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        step_fn: Callable[..., Any] | None,
        accumulate: int,
    ) -> None:
        if (loss_fn is None) == (step_fn is None):
            raise UsageError(
                "Trainer: expected either loss_fn(outputs, targets), for batches of inputs and"
                " targets, or step_fn(model, batch) that returns the loss, for all others"
            )
        name = "loss_fn" if step_fn is None else "step_fn"
        if not callable(loss_fn or step_fn):
            raise UsageError(f"Trainer({name}={loss_fn or step_fn!r:.60}): expected a function")
        self.loss_fn, self.step_fn, self.accumulate = loss_fn, step_fn, accumulate
        self.is_void = False  # losses count nothing at the moment: see stepping.py

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return this batch's part of the loss of a step: what model.forward_backward needs."""
        assert self.loss_fn is not None
        return self.part(_required(self.loss_fn(outputs, targets), "loss_fn"))

    def part(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the loss of a batch adds to that of a step."""
        if self.is_void:
            return loss * 0.0
        return loss if self.accumulate == 1 else loss / self.accumulate

    def measure(self, model: nn.Module, batch: Any) -> Measured:
        """Run the model on a batch."""
        if self.step_fn is None:
            assert self.loss_fn is not None
            inputs, targets = pair(batch)
            outputs = model(*as_inputs(inputs))
            return Measured(_required(self.loss_fn(outputs, targets), "loss_fn"), outputs, targets)
        found = self.step_fn(model, batch)
        if isinstance(found, tuple) and len(found) == 3:
            return Measured(_required(found[0], "step_fn"), *found[1:])
        return Measured(_required(found, "step_fn"), has_outputs=False)


def pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    found = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        found += f" of {len(batch)}"
    raise UsageError(
        f"rank {current().env.rank}: a batch is a {found}, expected inputs and targets (x, y);"
        " for other batches pass step_fn(model, batch), which returns the loss, in place of loss_fn"
    )


def _required(loss: Any, name: str) -> torch.Tensor:
    """Refuse what cannot be a loss."""
    who, what = f"rank {current().env.rank}", "the mean over the batch, a tensor with one number"
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"{who}: {name} returned a {type(loss).__name__}, expected {what}")
    if loss.numel() != 1:
        raise UsageError(
            f"{who}: {name} returned a tensor of shape {list(loss.shape)}, expected {what}:"
            " take its mean() (reduction='mean')"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(
            f"{who}: the loss that {name} returned depends on no parameter (requires_grad=False):"
            " compute it from the model's outputs, without detach(), item() or no_grad()"
        )
    return loss
