"""Guess an input for a model if the script passed no example.

The first layers with parameters show what the input is: token ids, features or images. Guesses are
small and are tried one after the other; if a model takes none of them, its submodules are tried.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.dry_run import evaluation_dry_run

NUM_LAYERS = 3  # layers that may be the first
Run = tuple[nn.Module, tuple[Any, ...]]


def find_runs(model: nn.Module, example: tuple[Any, ...] | None) -> list[Run]:
    """Return what to run in order to trace the model: itself, or submodules of it."""
    if example is not None:
        if not isinstance(example, tuple):
            raise UsageError(
                "tensor parallel: example must be the tuple of the model's arguments, as in"
                f" example=(tokens,); got {type(example).__name__}"
            )
        with evaluation_dry_run(model), torch.no_grad():
            model(*example)
        return [(model, example)]
    return _guessed(model)


def _guessed(module: nn.Module) -> list[Run]:
    if not any(True for _ in module.parameters()):
        return []
    for args in _guesses(module):
        try:
            with evaluation_dry_run(module), torch.no_grad():
                module(*args)
        except Exception:  # a model may raise anything for an input that does not fit
            continue
        return [(module, args)]
    return [run for child in module.children() for run in _guessed(child)]


def _guesses(module: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    layers = (m for m in module.modules() if any(True for _ in m.parameters(recurse=False)))
    param = next(module.parameters())
    floating = {"dtype": param.dtype if param.is_floating_point() else torch.float32}
    num = _num_arguments(module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for first in itertools.islice(layers, NUM_LAYERS):
            for one in _tensors(module, first, floating):
                one = one.to(param.device)
                yield tuple(one if k == 0 else one.clone() for k in range(num))


def _tensors(module: nn.Module, first: nn.Module, floating: dict[str, Any]) -> Iterator[Tensor]:
    if isinstance(first, nn.Embedding):
        tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
        for length in (8, 16, 64, 4):
            yield torch.randint(min(tables), (2, length))
    elif isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        for size in (32, 28, 64, 224):
            yield torch.randn(2, first.in_channels, *[size] * len(first.kernel_size), **floating)
    for width in _widths(first):
        yield torch.randn(2, 8, width, **floating)
        yield torch.randn(2, width, **floating)


def _widths(first: nn.Module) -> Iterator[int]:
    """Yield the numbers of features that a module may take."""
    if isinstance(first, nn.Linear):
        yield first.in_features
    elif isinstance(first, nn.MultiheadAttention):
        yield first.embed_dim
    elif isinstance(first, nn.LayerNorm):
        yield first.normalized_shape[-1]
    sizes = {size for p in first.parameters(recurse=False) for size in p.shape}
    yield from sorted(sizes, reverse=True)


def _num_arguments(module: nn.Module) -> int:
    given = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return max(1, sum(p.kind in kinds and p.default is p.empty for p in given))
