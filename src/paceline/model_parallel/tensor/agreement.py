"""What the processes of the axis must have in common before a model is cut."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import InconsistentRanks
from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.cut import mapped


def align(model: nn.Module, axis: Axis) -> None:
    """Give everybody the first process's parameters, buffers and random state."""
    state = torch.get_rng_state()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), state]:
            tensor.copy_(_of_the_first(tensor, axis))
    torch.set_rng_state(state)


def same_example(example: tuple[Any, ...] | None, axis: Axis) -> tuple[Any, ...] | None:
    """Return the first process's example."""
    same: tuple[Any, ...] | None = mapped(example, lambda t: _of_the_first(t, axis))
    return same


def agree(styles: Mapping[str, Any], axis: Axis) -> None:
    """Raise InconsistentRanks everywhere if somebody would cut other modules."""
    text = repr(sorted((name, str(style)) for name, style in styles.items()))
    numbers = axis.all_pieces(torch.tensor([zlib.crc32(text.encode())]))
    differing = [index for index, number in enumerate(numbers) if number != numbers[0]]
    if differing:
        raise InconsistentRanks(
            f"tensor parallel: the processes {differing} of the axis tp={axis.count} would cut"
            " other modules than process 0; what the model computes must not depend on the rank"
        )


def _of_the_first(tensor: Tensor, axis: Axis) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(copy, dist.get_global_rank(axis.group, 0), group=axis.group)
    return copy
