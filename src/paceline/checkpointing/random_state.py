"""The random generators of this process, as a checkpoint has them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_TORCH, _NUMPY, _CUDA = "random/torch", "random/numpy", "random/cuda"


def random_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's generators; tensors go to `tensors`."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors[_TORCH] = torch.get_rng_state()
    tensors[_NUMPY] = torch.from_numpy(np.asarray(keys, dtype=np.uint32).view(np.int32).copy())
    if torch.cuda.is_initialized():
        for device, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"{_CUDA}/{device}"] = state
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }


def set_random_state(plain: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Let the generators go on from there."""
    version, internal, gauss = plain["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, position, has_gauss, cached = plain["numpy"]
    keys = tensors[_NUMPY].clone().numpy().view(np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(tensors[_TORCH].clone())  # torch reads it as a struct: it must be aligned
    states = [tensors[name].clone() for name in sorted(tensors) if name.startswith(_CUDA)]
    if torch.cuda.is_available() and len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)
