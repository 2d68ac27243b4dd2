"""What a script says about the parts of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.model_parallel.train_step import Loss


@dataclass(frozen=True)
class Wishes:
    """What the script says about the parts of its model."""

    loss: Loss | None = None
    example: tuple[Any, ...] | None = None  # inputs of the model, of the size of a batch
    plan: Mapping[str, Any] | None = None
    splits: Sequence[str] | None = None
    schedule: str = "1f1b"
    microbatches: int | str = "auto"
    activations: str = "keep"
    init: Callable[[nn.Module], None] | None = None
    seed: int = 0
