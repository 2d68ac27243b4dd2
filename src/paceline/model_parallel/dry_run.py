"""Dry runs: run a model without changing it or the random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.comm.devices import devices_of

# In evaluation torch's encoders read their layers' weights and call fused kernels; with these
# settings they call their modules, as in training.
_FUSED: list[tuple[type[nn.Module], str, Any]] = [
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
]


@contextmanager
def dry_run(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients, attributes and random states when the block ends."""
    modules = list(model.modules())
    attributes = [_copy_attributes(module) for module in modules]
    # In-place changes (the statistics of batch norms) need a copy of the values.
    buffers = [(one, one.clone()) for one in model.buffers() if one.device.type != "meta"]
    gradients = [(param, param.grad) for param in model.parameters()]
    for param, _ in gradients:
        param.grad = None  # so that the block accumulates into tensors of its own
    found = devices_of(param for param, _ in gradients)
    kind = found[0].type if found else "cpu"
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device.index for device in found], device_type=kind):
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


@contextmanager
def evaluation_dry_run(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with a fixed random state, without fused inference layers; restores all."""
    with dry_run(model):
        unfuse(model)
        model.eval()
        torch.manual_seed(0)
        yield


def unfuse(model: nn.Module) -> None:
    """Let torch's encoders call their modules in evaluation too."""
    for module in model.modules():
        for kind, attribute, value in _FUSED:
            if isinstance(module, kind):
                setattr(module, attribute, value)


def _copy_attributes(module: nn.Module) -> dict[str, Any]:
    saved = dict(module.__dict__)
    for key in ("_parameters", "_buffers", "_modules"):
        saved[key] = dict(saved[key])
    return saved
