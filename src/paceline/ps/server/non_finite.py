"""Gradients that are NaN or infinite: finding them, and saying whose they are.

Looking costs one pass. The mean of finite numbers is finite unless it overflows, so a synchronous
table looks at the mean first and at what the workers pushed only if that is bad.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.ps.server.worker_statistics import PushedGradient
from paceline.ps.spec import ShardSpec

_SHOWN = 5


def is_finite(flat: torch.Tensor) -> bool:
    """Return whether every number is finite; one pass, and no memory."""
    if not flat.numel():
        return True
    low, high = torch.aminmax(flat)  # both are NaN if any element is
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def culprits(spec: ShardSpec, pushes: Mapping[int, PushedGradient]) -> dict[int, list[str]]:
    """Return the workers whose gradients of a shard are not finite, and the parameters."""
    found = {worker: bad_parameters(spec, push) for worker, push in pushes.items()}
    return {worker: names for worker, names in found.items() if names}


def bad_parameters(spec: ShardSpec, push: PushedGradient) -> list[str]:
    """Return the parameters of a shard whose gradients are not finite."""
    if is_finite(push.grad):
        return []
    return [
        piece.name
        for piece in spec.pieces
        if piece.param not in push.absent
        and not is_finite(push.grad.narrow(0, piece.start, piece.count))
    ]


def describe(spec: ShardSpec, found: Mapping[int, list[str]]) -> str:
    """Return which workers pushed which bad gradients; none: only the sum is bad."""
    where = f"a gradient in shard {spec.label!r} is NaN or infinite"
    if not found:
        return f"{where} (no worker's alone: the sum over the workers overflowed)"
    return f"{where} ({'; '.join(f'worker {w}: {_list(n)}' for w, n in found.items())})"


def advice(text: str) -> str:
    """Complete an error about gradients that are not finite."""
    return (
        f"{text}. The step is not applied: lower the learning rate, clip gradients or look at that"
        " worker's batch; nonfinite=skip leaves such steps out, nonfinite=quarantine such pushes"
    )


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
