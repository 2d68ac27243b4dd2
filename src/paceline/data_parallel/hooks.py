"""What a distributed model carries around: hooks around forward, and `no_sync`.

A copy of the model (for an exponential moving average, say) or a saved one is a plain model again
(plain.py): what hangs on it refers to the training of the original.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from paceline.data_parallel.plain import StandIn, keep_plain


class Watcher(Protocol):
    """Who wants to know of forward passes."""

    def before_forward(self) -> None: ...
    def after_forward(self, output: Any) -> Any: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def agreed(self) -> AbstractContextManager[None]: ...
    def pull(self) -> None: ...
    def settle(self) -> None: ...
    def subscribe(self, after: int = -1) -> object: ...


def attach(model: nn.Module, watcher: Watcher) -> None:
    """Tell `watcher` of every forward pass of this model, and give the model its `no_sync`."""
    original = weakref.ref(model)

    def before(module: nn.Module, _: Any) -> None:
        # Inside torch.compile nothing may happen here; parameters announce the backward pass then.
        if not torch.compiler.is_compiling() and module is original():
            watcher.before_forward()

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling() and module is original():
            return watcher.after_forward(output)  # None leaves it as it is
        return None

    for module in model.modules():
        keep_plain(module, watcher.settle)
    model.register_forward_pre_hook(Detached(before, nothing))
    model.register_forward_hook(Detached(after, nothing))
    object.__setattr__(model, "no_sync", Detached(watcher.no_sync, nullcontext))
    object.__setattr__(model, "agreed", Detached(watcher.agreed, nullcontext))
    object.__setattr__(model, "pull", Detached(watcher.pull, nothing))
    object.__setattr__(model, "subscribe", Detached(watcher.subscribe, nothing))


def cut_off(output: Any) -> Any:
    """Return a model's output whose gradients end there, before they come to any parameter."""

    def cut(thing: Any) -> Any:
        is_live = isinstance(thing, torch.Tensor) and thing.requires_grad
        return thing.detach().requires_grad_() if is_live else thing

    return tree_map(cut, output)


class Detached(StandIn):
    """A function that a copy of its owner does not take along.

    A class that copies its attributes by itself finds `in_copies` there.
    """

    def __init__(self, function: Callable[..., Any], in_copies: Callable[..., Any]) -> None:
        self._function = function
        self._in_copies = in_copies

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self._in_copies

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _same, (self._in_copies,)


def nothing(*_: Any) -> None:
    """Stand in for a hook."""


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
