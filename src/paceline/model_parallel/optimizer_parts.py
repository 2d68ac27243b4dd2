"""The script's optimizer, when this process holds only a part of the model.

It stays the object that the script made: in its param groups the parameters of the whole model are
replaced by the parts that are here, or left out; so is what it remembers of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paceline.data_parallel.ownership import is_elementwise
from paceline.errors import UsageError
from paceline.model_parallel.parts import Held, Holding


def find_problem_with_cuts(optimizer: torch.optim.Optimizer, what: str) -> str | None:
    """Say why an optimizer cannot work on parts of matrices; None: it can."""
    if is_elementwise(optimizer):
        return None
    return (
        f"{type(optimizer).__name__} looks at whole parameters, and {what} cuts them: use an"
        " optimizer that treats every element by itself (SGD, Adam, AdamW ...), or only pp and dp"
    )


def use_parts(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], holding: Holding
) -> None:
    """Let an optimizer have the parts that are held in place of the whole model's parameters.

    A param group of which nothing is here stays, with no parameters: schedulers set rates by
    position.
    """
    for number, group in enumerate(optimizer.param_groups):
        mine: list[nn.Parameter] = []
        for param in group["params"]:
            if param not in names:
                raise UsageError(
                    f"param group {number} of the optimizer has a parameter of shape"
                    f" {list(param.shape)} that the model does not have; make the optimizer from"
                    " model.parameters() of the model that you pass"
                )
            state = optimizer.state.pop(param, None)
            held = holding.held.get(names[param])
            if held is None:
                continue
            mine.append(held.param)
            if state:
                optimizer.state[held.param] = {k: _cut(v, held) for k, v in state.items()}
        group["params"] = mine


def _cut(value: object, held: Held) -> object:
    if isinstance(value, torch.Tensor) and tuple(value.shape) == held.part.shape:
        return held.part.of(value).clone()
    return value
