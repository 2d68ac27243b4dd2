"""What people see of a training: the line at its start, and figures beside its progress."""

from __future__ import annotations

import weakref

import torch

from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.setup import Groundwork
from paceline.data_parallel.update.served import ServedUpdate
from paceline.observe.telemetry.events import LEARNING_RATE, STALENESS


def describe(ground: Groundwork, reducer: Reducer, way: str, num_global_norms: int) -> str:
    """Return in one line what was set up; `way`: how steps are taken."""
    params, options = sum(p.numel() for p in reducer.params), ground.options
    parts = [
        f"{_count(params)} parameters in {_plural(len(reducer.buckets), 'bucket')}",
        _plural(ground.group.size, "worker"),
        way,
        f"buffers {ground.buffers_mode}",
    ]
    if options.precision != "fp32":
        parts.append(f"computes in {options.precision}")
    if ground.serving is not None:
        parts.append(ground.serving.balance)
    if ground.centre is not None:
        parts.append(ground.centre.describe())
    if num_global_norms:
        parts.append(f"global statistics in {num_global_norms} batch norms")
    return ", ".join(parts)


def watch(ground: Groundwork, optimizer: torch.optim.Optimizer) -> None:
    """Let progress show the learning rate, and how stale updates are where they can be."""
    optimized, reporter = weakref.ref(optimizer), ground.job.reporter
    reporter.watch(LEARNING_RATE, lambda: _rate_of(optimized()))
    if ground.serving is not None and ground.is_free:
        served = weakref.ref(ground.serving.update)
        reporter.watch(STALENESS, lambda: _staleness_of(served()))


def _rate_of(optimizer: torch.optim.Optimizer | None) -> float | None:
    """Return the learning rate of the first parameters, if there is one."""
    rate = optimizer.param_groups[0].get("lr") if optimizer and optimizer.param_groups else None
    return float(rate) if isinstance(rate, int | float | torch.Tensor) else None


def _staleness_of(update: ServedUpdate | None) -> int | None:
    return None if update is None else update.staleness


def _count(number: int) -> str:
    """Write 25185280 as '25.2 M'."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
