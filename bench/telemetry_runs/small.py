"""A model with steps of a millisecond or two: whatever a step costs beside computing shows here."""

from __future__ import annotations

import torch
from models import Task
from torch import nn

_WIDE = 256


def _model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(_WIDE, _WIDE), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(_WIDE, 10))


SMALL = Task(
    "MLP 256-256-256-256-10",
    _model,
    64,
    lambda batch: (torch.randn(batch, _WIDE), torch.randint(10, (batch,))),
)
