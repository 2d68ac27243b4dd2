"""Checks of a Trainer's arguments, before training begins."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.data_parallel.distribute import distributed
from paceline.errors import UsageError
from paceline.model_parallel.distribute import mesh_models
from paceline.runtime.config import requested_mesh
from paceline.runtime.mesh import Mesh

_OWN = [
    *("loss_fn", "step_fn", "scheduler", "scheduler_every", "checkpoint", "accumulate"),
    *("metrics", "callbacks", "max_norm", "precision", "mesh", "pace"),
]
_TAKEN = ("loss", "epoch", "lr")


def require_settings(accumulate: Any, max_norm: Any, options: Mapping[str, Any]) -> None:
    """Raise UsageError for invalid numbers, and for misspelt names."""
    whole_number("accumulate", accumulate, least=1)
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
        raise UsageError(f"Trainer(max_norm={max_norm!r}): expected a number above 0, or None")
    for name in options:
        if name == "loss":
            raise UsageError("Trainer(loss=...): the loss of a Trainer is called loss_fn")
        near = difflib.get_close_matches(name, _OWN, n=1, cutoff=0.75)
        if near:
            raise UsageError(f"Trainer has no argument {name!r} (did you mean {near[0]}?)")


def whole_number(name: str, value: Any, *, least: int) -> int:
    """Return a whole number; UsageError if it is too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}: expected a whole number, {least} or more")
    return value


def require_plain(model: nn.Module) -> None:
    """Raise UsageError for a model that is distributed already."""
    if model in mesh_models or any(model is one for one, _ in distributed()):
        raise UsageError(
            "Trainer: this model has been distributed already, which the Trainer does itself; leave"
            " out pl.distribute and pass its arguments to the Trainer (to continue training, call"
            " fit() again), or write the loop by hand"
        )


def require_loss_for_stages(mesh: str | None, step_fn: Any) -> None:
    """Raise UsageError for a loss that the last stage of a pipeline cannot compute."""
    asked = requested_mesh() or mesh
    if step_fn is not None and asked is not None and Mesh.parse(asked).pp > 1:
        raise UsageError(
            f"mesh {asked} and step_fn: with pp no process has the full model, and the last stage"
            " computes the loss; pass loss_fn(outputs, targets), with batches of inputs and targets"
        )


def require_scheduler(scheduler: Any, every: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an invalid scheduler, or one of another optimizer."""
    if every not in ("step", "epoch"):
        raise UsageError(f"Trainer(scheduler_every={every!r}): expected 'step' or 'epoch'")
    if scheduler is None:
        return
    lacking = [m for m in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, m)]
    if lacking:
        raise UsageError(
            f"Trainer(scheduler={type(scheduler).__name__}): it has no"
            f" {' and no '.join(lacking)}(); expected one of torch.optim.lr_scheduler"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            f"Trainer(scheduler={type(scheduler).__name__}): it belongs to another optimizer;"
            " create it with the optimizer that you pass"
        )
    if every == "step" and isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "Trainer(scheduler=ReduceLROnPlateau, scheduler_every='step'): it follows the loss of"
            " epochs; leave out scheduler_every"
        )


def require_metrics(metrics: Any) -> dict[str, Any]:
    """Return the metrics by name; UsageError if one is invalid."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"Trainer(metrics={metrics!r:.60}): expected functions by name, such as"
            ' {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()}'
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise UsageError(
                f"Trainer(metrics={{{name!r}: ...}}): expected another name, like that of a"
                f" variable and none of {', '.join(_TAKEN)}"
            )
        if not callable(metric):
            raise UsageError(
                f"Trainer(metrics={{{name!r}: {metric!r:.40}}}): expected a function of outputs and"
                " targets that returns the mean over the batch"
            )
    return dict(metrics)
