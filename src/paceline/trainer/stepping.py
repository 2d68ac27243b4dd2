"""From a batch to a step: compute the loss, accumulate, clip and scale gradients, step.

The loss is `loss_fn(outputs, targets)` or `step_fn(model, batch)`. The gradients of `accumulate`
batches add up to one step, and the loss of each counts 1 / accumulate. If an epoch ends with fewer
batches than that, they make a step of their own, with the smaller sum. The loader's length says
which batch is the last of an epoch. A stream has no length, and an epoch may become longer when
batches of a lost worker are used again; then the end shows only when no further batch comes. The
accumulated gradients are exchanged then in a backward pass that adds nothing: that of the last
batch again, with its loss times zero.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm.devices import is_on_device
from paceline.data_parallel.amp.grad_scaler import GradScaler
from paceline.errors import UsageError
from paceline.model_parallel.distribute import clip_grad_norm_
from paceline.model_parallel.train_step import as_inputs
from paceline.runtime.job import current


@dataclass(frozen=True)
class BatchResult:
    """The results of one batch."""

    loss: torch.Tensor
    outputs: Any = None
    targets: Any = None
    has_outputs: bool = True


class Objective:
    """Computes losses, and raises UsageError for values that are not a loss."""

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
        self.is_void = False  # losses are multiplied by 0: see `exchange_held`

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return this batch's part of the loss of a step, for model.forward_backward."""
        assert self.loss_fn is not None
        return self.part(_required(self.loss_fn(outputs, targets), "loss_fn"))

    def part(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the part of a batch's loss in the loss of a step."""
        if self.is_void:
            return loss * 0.0
        return loss if self.accumulate == 1 else loss / self.accumulate

    def measure(self, model: nn.Module, batch: Any) -> BatchResult:
        """Run the model on a batch."""
        if self.step_fn is None:
            assert self.loss_fn is not None
            inputs, targets = pair(batch)
            outputs = model(*as_inputs(inputs))
            return BatchResult(
                _required(self.loss_fn(outputs, targets), "loss_fn"), outputs, targets
            )
        found = self.step_fn(model, batch)
        if isinstance(found, tuple) and len(found) == 3:
            return BatchResult(_required(found[0], "step_fn"), *found[1:])
        return BatchResult(_required(found, "step_fn"), has_outputs=False)


def pair(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch."""
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
    """Return a loss; UsageError if it cannot be one."""
    where, what = f"rank {current().env.rank}", "the mean over the batch, a tensor with one number"
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"{where}: {name} returned a {type(loss).__name__}, expected {what}")
    if loss.numel() != 1:
        raise UsageError(
            f"{where}: {name} returned a tensor of shape {list(loss.shape)}, expected {what}:"
            " take its mean() (reduction='mean')"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(
            f"{where}: the loss that {name} returned depends on no parameter (requires_grad=False):"
            " compute it from the model's outputs, without detach(), item() or no_grad()"
        )
    return loss


class StepRunner:
    """Trains one model, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        max_norm: float | None,
        scaler: GradScaler | None,
        has_stages: bool,  # pp: no process has the full model
    ) -> None:
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._max_norm, self._scaler, self._has_stages = max_norm, scaler, has_stages
        self._length: int | None = None
        self._last: Any = None
        self.batches = 0  # of this epoch
        self._held = 0  # batches with gradients that no step has used

    def begin_epoch(self, done: int, length: int | None) -> None:
        """Begin an epoch after `done` batches; `length` is its number of batches, if known."""
        self.batches, self._length = done, length

    @property
    def begins(self) -> bool:
        """Whether the next batch begins a step."""
        return self._held == 0

    @property
    def closes(self) -> bool:
        """Whether the next batch ends a step."""
        is_full = self._held + 1 == self._objective.accumulate
        return is_full or self.batches + 1 == self._length

    def compute(self, batch: Any, *, closes: bool) -> float | torch.Tensor:
        """Add the gradients of a batch, and average them over the workers if it ends the step.
        Return its loss; a tensor if a device computes it."""
        if self._held == 0:
            self._optimizer.zero_grad()
        with nullcontext() if closes else self._model.no_sync():  # type: ignore[operator]
            loss = self._backward(batch)
        self.batches += 1
        self._held += 1
        self._last = None if closes else batch
        return loss

    def update(self) -> None:
        """Step with the accumulated gradients."""
        self._held = 0
        if self._scaler is None:
            self._clip()
            self._optimizer.step()
            return
        if self._max_norm is not None:
            self._scaler.unscale_(self._optimizer)
            self._clip()
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def exchange_held(self) -> None:
        """Average the accumulated gradients when no further batch comes."""
        self._objective.is_void = True
        try:
            self._backward(self._last)
        finally:
            self._objective.is_void, self._last = False, None

    def _backward(self, batch: Any) -> float | torch.Tensor:
        if self._has_stages:
            inputs, targets = pair(batch)
            part = self._model.forward_backward(inputs, targets)  # type: ignore[operator]
            return float(part) * self._objective.accumulate
        loss = self._objective.measure(self._model, batch).loss
        part = self._objective.part(loss)
        (part if self._scaler is None else self._scaler.scale(part)).backward()
        return loss.detach() if is_on_device(loss) else float(loss.detach())

    def _clip(self) -> None:
        if self._max_norm is not None:
            clip_grad_norm_(self._model, self._max_norm)
