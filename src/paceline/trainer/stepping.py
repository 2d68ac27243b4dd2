"""Batches become a step: gradients of `accumulate` batches add up, are clipped, and the optimizer
steps.

The loss of each batch counts 1 / accumulate. If an epoch ends with fewer batches than that, they
make a step of their own, with the smaller sum. Which batch is an epoch's last is known from the
loader's length. Where there is none (a stream), or where it is longer than it was (batches that
come again because a worker was lost), it shows only when no further batch comes. What has added up
locally is then exchanged in a backward pass that adds nothing: that of the last batch again, with
its loss times zero.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from paceline.data_parallel.grad_scaler import GradScaler
from paceline.model_parallel.distribute import clip_grad_norm_
from paceline.trainer.objective import Objective, pair


class Stepping:
    """Trains one model, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        max_norm: float | None,
        scaler: GradScaler | None,
        has_stages: bool,  # no process has the whole model: pp
    ) -> None:
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._max_norm, self._scaler, self._has_stages = max_norm, scaler, has_stages
        self._length: int | None = None
        self._last: Any = None
        self.batches = 0  # of this epoch
        self._held = 0  # batches whose gradients wait for a step

    def begin_epoch(self, done: int, length: int | None) -> None:
        """Begin an epoch behind so many batches, of so many if that is known."""
        self.batches, self._length = done, length

    @property
    def begins(self) -> bool:
        """Whether a step begins with the next batch."""
        return self._held == 0

    @property
    def closes(self) -> bool:
        """Whether a step ends with the next batch."""
        is_full = self._held + 1 == self._objective.accumulate
        return is_full or self.batches + 1 == self._length

    def compute(self, batch: Any, *, closes: bool) -> float:
        """Add the gradients of a batch, averaged with the other workers' if the step ends with it;
        return its loss."""
        if self._held == 0:
            self._optimizer.zero_grad()
        with nullcontext() if closes else self._model.no_sync():  # type: ignore[operator]
            loss = self._backward(batch)
        self.batches += 1
        self._held += 1
        self._last = None if closes else batch
        return loss

    def update(self) -> None:
        """Step with what has added up."""
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
        """Average what waits for a step, when no further batch comes."""
        self._objective.is_void = True
        try:
            self._backward(self._last)
        finally:
            self._objective.is_void, self._last = False, None

    def _backward(self, batch: Any) -> float:
        if self._has_stages:
            inputs, targets = pair(batch)
            part = self._model.forward_backward(inputs, targets)  # type: ignore[operator]
            return float(part) * self._objective.accumulate
        loss = self._objective.measure(self._model, batch).loss
        part = self._objective.part(loss)
        (part if self._scaler is None else self._scaler.scale(part)).backward()
        return float(loss.detach())

    def _clip(self) -> None:
        if self._max_norm is not None:
            clip_grad_norm_(self._model, self._max_norm)
