"""Split batches into microbatches, and join outputs: along the first dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.schedules import choose_microbatches


def count_rows(inputs: Sequence[Tensor], targets: Any = None) -> int:
    """Return how many rows a batch has; UsageError if its tensors differ."""
    named = [(f"input {number}", value) for number, value in enumerate(inputs)]
    named += [(f"target{path}", value) for path, value in _tensors(targets)]
    rows = 0
    for name, value in named:
        if not isinstance(value, Tensor):
            raise UsageError(
                f"pipeline: {name} is {type(value).__name__}; the inputs of a model that is split"
                " into stages must be tensors"
            )
        if value.ndim == 0:  # each microbatch gets it unchanged
            continue
        rows = rows or len(value)
        if not len(value) or len(value) != rows:
            raise UsageError(
                f"pipeline: {name} has {len(value)} rows, {named[0][0]} has {rows}; a batch is"
                " split along the first dimension of all its tensors, so these must be equal; make"
                " a tensor that is not part of a batch a buffer of the model"
            )
    if not rows:
        raise UsageError("pipeline: no tensor of the batch has rows; pass the model's inputs")
    return rows


def count_microbatches(rows: int, asked: int | str, schedule: str, num_ranks: int) -> int:
    """Return the number of microbatches for a batch to train on; UsageError if none fits."""
    if asked == "auto":
        return choose_microbatches(schedule, num_ranks, rows)
    number = int(asked)
    if rows % number:
        fitting = [n for n in range(min(rows, 8 * num_ranks), 0, -1) if rows % n == 0]
        raise UsageError(
            f"pipeline: a batch of {rows} rows cannot be split into {number} equal microbatches"
            f" ({rows} = {rows // number} x {number} + {rows % number}); if it is the last of an"
            " epoch, pass drop_last=True to the loader; otherwise choose a batch size that"
            f" {number} divides, microbatches={fitting[0]}, or microbatches='auto'"
        )
    return number


def split_batch(structure: Any, rows: int, count: int) -> list[Any]:
    """Split each tensor of a structure into `count` parts, which may differ by one row."""
    leaves, spec = pytree.tree_flatten(structure)
    parts = [
        leaf.tensor_split(count) if isinstance(leaf, Tensor) and leaf.ndim else [leaf] * count
        for leaf in leaves
    ]
    assert all(len(p) == count for p in parts) and count <= rows
    return [pytree.tree_unflatten([p[number] for p in parts], spec) for number in range(count)]


def microbatch_sizes(rows: int, count: int) -> list[int]:
    """Return the rows of each part that `split_batch` makes."""
    return [rows // count + (number < rows % count) for number in range(count)]


def have_rows(outputs: Sequence[Tensor], rows: int) -> bool:
    """Return whether outputs have a row for each row of the batch, so that they can be joined."""
    return all(output.ndim and len(output) == rows for output in outputs)


def join_outputs(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the joined outputs of microbatches."""
    if len(parts) == 1:
        return list(parts[0])
    return [torch.cat(together) for together in zip(*parts, strict=True)]


def _tensors(structure: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in pytree.tree_flatten_with_path(structure)[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf
