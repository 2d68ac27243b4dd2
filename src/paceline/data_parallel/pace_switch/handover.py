"""The state between two paces: a plain model, and the full state of a plain optimizer.

However a pace has spread parameters and optimizer state (shards on each worker of a host, shards on
servers, copies that diverged for some steps), after its last step every worker has all of it, the
same as the others. The next pace spreads it again. Only what a codec has left out of gradients is
each worker's own; it is added to the first gradients at the next pace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object

OptimizerState = dict[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class GatheredState:
    """The state that all workers agree on after the last step at a pace."""

    state: OptimizerState  # of the optimizer
    values: Sequence[torch.Tensor] = ()  # of the buckets, if parameters have diverged


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return a copy of the full state of an optimizer, by parameter, wherever it is kept."""
    params = params_of(optimizer)
    by_number = optimizer.state_dict()["state"]
    return {
        params[number]: {key: _copy(value) for key, value in entries.items()}
        for number, entries in by_number.items()
        if isinstance(number, int)
    }


def set_optimizer_state(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Replace the state of an optimizer; tensors go to the device of their parameter."""
    optimizer.state = defaultdict(dict)
    for group in optimizer.param_groups:
        counts_there = bool(group.get("fused") or group.get("capturable"))
        for param in group["params"]:
            if param in state:
                optimizer.state[param] = {
                    key: _placed(value, param, counts_there) for key, value in state[param].items()
                }


def _placed(value: Any, param: nn.Parameter, counts_there: bool) -> Any:
    """Return an entry where torch's optimizers keep it: counts are on the CPU, as a rule."""
    if not isinstance(value, torch.Tensor) or value.device == param.device:
        return value
    return value.to(param.device) if value.dim() or counts_there else value


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order in which `state_dict()` numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


# -- the mean of several optimizers' states ---------------------------------------------------
#
# Of counts (a number, or a tensor with one value, such as Adam's step) the largest counts. What
# only some workers have, because the others never had a gradient there, is zero on the others.


def average_state(optimizer: torch.optim.Optimizer, state: OptimizerState, group: Group) -> None:
    """Replace `state` by the mean of all workers' states. Collective."""
    params = params_of(optimizer)
    here = [
        [number, key, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for number, param in enumerate(params)
        for key, value in sorted(state.get(param, {}).items())
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    everywhere: dict[tuple[int, str], tuple[str, list[int]]] = {}
    for there in all_gather_object(group, here):
        everywhere.update({(number, key): (dtype, shape) for number, key, dtype, shape in there})
    for (number, key), (dtype, shape) in sorted(everywhere.items()):
        entries = state.setdefault(params[number], {})
        if key not in entries:
            device = params[number].device if shape else None
            entries[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        value = entries[key]
        flat = value.detach().contiguous().cpu()
        group.all_reduce(flat, "max" if _is_count(value) else "mean")
        if flat.device != value.device or flat.data_ptr() != value.data_ptr():
            value.copy_(flat)


StateByName = Mapping[str, Mapping[str, Any]]  # an optimizer's state, by the names of parameters


def mean_state(states: Sequence[StateByName]) -> dict[str, dict[str, Any]]:
    """Return the mean of the states of several optimizers."""
    pairs = ((param, key) for state in states for param, its in state.items() for key in its)
    mean: dict[str, dict[str, Any]] = {}
    for param, key in dict.fromkeys(pairs):
        found = [state[param][key] for state in states if key in state.get(param, {})]
        mean.setdefault(param, {})[key] = _mean_value(found, len(states))
    return mean


def _mean_value(found: Sequence[Any], count: int) -> Any:
    first = found[0]
    if isinstance(first, torch.Tensor):
        every = torch.stack(list(found))
        return every.amax(0) if _is_count(first) else every.sum(0).div_(count)
    return max(found) if isinstance(first, int | float) else first


def _is_count(value: torch.Tensor) -> bool:
    return value.numel() == 1 or not value.is_floating_point()


def make_plain(model: nn.Module) -> None:
    """Move parameters and gradients out of shared memory, and out of memory that will be freed."""
    with torch.no_grad():
        for param in model.parameters():
            grad = param.grad
            param.grad = None
            param.data = param.detach().clone()
            if grad is not None:
                param.grad = grad.clone()


def add_once(left: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Add this to the next gradient of each parameter: a codec has left it out."""
    for param, tensor in left.items():
        if param.requires_grad:
            _AddOnce(param, tensor)


class _AddOnce:
    """A hook that removes itself.

    It runs after a gradient has been accumulated: weights and scales have been applied by then,
    and must not apply to what was left out.
    """

    def __init__(self, param: nn.Parameter, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._handle = param.register_post_accumulate_grad_hook(self._add)

    def _add(self, param: torch.Tensor) -> None:
        self._handle.remove()
        if param.grad is not None:
            param.grad.add_(self._tensor)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
