"""optimizer.step() in a distributed model: what happens around the user's own step.

The optimizer stays the object that the script made: schedulers, GradScaler and state_dict see what
they know. Only its `step` is replaced, by a method that lets an UPDATE run the real one:

    ReplicatedUpdate    every worker updates everything, from the same averaged gradients
    ShardedUpdate       (sharded.py) every worker of a host updates its part of shared parameters
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch

from paceline.data_parallel.plain import keep_optimizer_plain
from paceline.errors import UsageError
from paceline.telemetry.trace import tracer

Step = Callable[[], Any]
_BOUND = "_paceline_binds"


class Update(Protocol):
    """Runs the optimizer's own step on what this worker has to update."""

    name: str
    waited_s: float  # for other workers, in all steps so far

    def run(self, step: Step) -> Any:
        """Call `step`, once; afterwards the parameters are the same on all workers."""


class ReplicatedUpdate:
    """Every worker does the same to its own copy."""

    name = "replicated"
    waited_s = 0.0

    def run(self, step: Step) -> Any:
        return step()


def replace_method(thing: object, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method on one object by a function that takes it as first argument; return the old.

    It stays a bound method, because learning-rate schedulers ask for its __func__, and keeps the
    attributes of the old one, in which they leave their marks.
    """
    old: Callable[..., Any] = getattr(thing, name)
    function = functools.wraps(old)(method)
    setattr(thing, name, MethodType(function, thing))
    return old


def restore_method(thing: object, name: str, old: Callable[..., Any]) -> None:
    """Give one object back the method that `replace_method` returned."""
    if getattr(old, "__func__", None) is getattr(type(thing), name, None):
        delattr(thing, name)  # it had its class's
    else:
        setattr(thing, name, old)


def bind_step(
    optimizer: torch.optim.Optimizer, around: Callable[[torch.optim.Optimizer, Step], Any]
) -> None:
    """Let `around(optimizer, step)` decide what `optimizer.step()` does."""

    def step(self: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise UsageError(
                f"{type(self).__name__}.step(closure): a closure computes the loss inside the"
                " step, where the workers could come to different decisions; call backward()"
                " before step() and pass no closure"
            )
        return around(self, own)

    def own() -> Any:
        traced_s = tracer.start()
        result = old()
        if traced_s:
            tracer.add("optimizer", traced_s)
        return result

    keep_optimizer_plain(optimizer)
    old = replace_method(optimizer, "step", step)
    if hasattr(old, _BOUND):  # on a mesh its step is bound twice; what is inside is recorded
        own = old
    setattr(step, _BOUND, True)
