"""Run a model's forward pass without leaving a trace in the model or in the random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients, attributes and random states back when the block ends."""
    modules = list(model.modules())
    attributes = [_copied(module) for module in modules]
    # In place changes (the statistics of batch norms) need a copy of the values.
    buffers = [(one, one.clone()) for one in model.buffers() if one.device.type != "meta"]
    gradients = [(param, param.grad) for param in model.parameters()]
    for param, _ in gradients:
        param.grad = None  # so that what is accumulated meanwhile goes into tensors of its own
    devices = {param.device.index for param, _ in gradients if param.is_cuda}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, saved in zip(modules, attributes, strict=True):
            module.__dict__.clear()
            module.__dict__.update(saved)
        with torch.no_grad():
            for one, values in buffers:
                one.copy_(values)
        for param, gradient in gradients:
            param.grad = gradient


def _copied(module: nn.Module) -> dict[str, Any]:
    saved = dict(module.__dict__)
    for key in ("_parameters", "_buffers", "_modules"):
        saved[key] = dict(saved[key])
    return saved
