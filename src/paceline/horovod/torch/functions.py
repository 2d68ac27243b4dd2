"""Broadcasts of a model's parameters and of an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.horovod.objects import broadcast_object
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.operations import broadcast_async_, synchronize


def broadcast_parameters(
    params: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the root's tensors into these: a state_dict, or an iterable of parameters or of
    (name, parameter)."""
    handles = [
        broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in _named(params)
        if tensor is not None
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Any) -> list[tuple[str | None, torch.Tensor | None]]:
    if isinstance(params, Mapping):
        found: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        found = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise UsageError(
            f"broadcast_parameters: {type(params).__name__} is not a state_dict or an iterable of"
            " parameters; pass model.state_dict() or model.named_parameters()"
        )
    for name, tensor in found:
        if tensor is not None and not torch.is_tensor(tensor):
            raise UsageError(
                f"broadcast_parameters: {name} is a {type(tensor).__name__}, not a tensor; send it"
                " with hvd.broadcast_object"
            )
    return found


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> None:
    """Load the root's optimizer state and hyperparameters on every rank, for any optimizer.

    An optimizer without state stays without; no gradients are made.
    """
    mine = optimizer.state_dict()
    name = process_set.next_name("broadcast_optimizer_state")
    state = broadcast_object(mine, root_rank, name, process_set)
    if process_set.named.rank != process_set.member_of(root_rank, "broadcast_optimizer_state"):
        with in_place(optimizer):
            optimizer.load_state_dict(state)


@contextmanager
def in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a state that is loaded change the optimizer's dicts, where torch replaces them.

    A DistributedOptimizer shares them with the optimizer that it was made from, and a scheduler
    that was made for that one changes its learning rates.
    """
    groups, states = optimizer.param_groups, optimizer.state
    yield
    if optimizer.param_groups is groups:
        return
    for shared, loaded in zip(groups, optimizer.param_groups, strict=True):
        _fill(shared, loaded)
    _fill(states, optimizer.state)
    optimizer.param_groups, optimizer.state = groups, states


def _fill(shared: dict[Any, Any], loaded: dict[Any, Any]) -> None:
    shared.clear()
    shared.update(loaded)
