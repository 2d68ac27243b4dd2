"""Additions to a distributed model: hooks around forward, `no_sync` and other methods.

Copies do not have them. A saved or copied distributed model is a PLAIN model; the same holds for
its optimizer. The tensors of a distributed model lie in engine memory, and its optimizer's state
may be spread over workers and servers. `torch.save(model)`, pickle and `copy.deepcopy` ask an
object how to rebuild it (`__reduce_ex__`), the instance before its class. So modules, tensors and
optimizers that Paceline has changed get an answer of their own: that of the class, without
Paceline's additions, and with ordinary memory. No other worker is involved.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from paceline.data_parallel.pace_switch.handover import full_optimizer_state
from paceline.errors import UsageError

_REDUCE, _DEEPCOPY = "__reduce_ex__", "__deepcopy__"


class StandIn:
    """An attribute or hook that Paceline added to a module, a tensor or an optimizer.

    A copy has `own` instead, or nothing if that is None.
    """

    own: Any = None


def make_copies_plain(module: nn.Module, settle: Callable[[], None] = lambda: None) -> None:
    """Make copies of a module plain; `settle` waits for values that have not arrived yet."""
    if _REDUCE not in vars(module):
        vars(module)[_REDUCE] = _ModuleReduction(module, settle)


def make_tensor_copies_plain(tensor: torch.Tensor) -> None:
    """Give copies of a parameter or buffer memory of their own."""
    if type(tensor) in (nn.Parameter, torch.Tensor) and _REDUCE not in vars(tensor):
        vars(tensor)[_REDUCE] = _TensorReduction(tensor)
        if not isinstance(tensor, nn.Parameter):  # torch copies parameters without attributes
            vars(tensor)[_DEEPCOPY] = _TensorCopy(tensor)


def make_optimizer_copies_plain(optimizer: torch.optim.Optimizer) -> None:
    """Make copies of an optimizer plain, with the full state of all parameters."""
    if _REDUCE not in vars(optimizer):
        vars(optimizer)[_REDUCE] = _OptimizerReduction(optimizer)


def replace_method(thing: object, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method on one object by a function that takes it as first argument; return the old.

    It stays a bound method, because learning-rate schedulers use its __func__, and keeps the
    attributes of the old one, in which they store flags.
    """
    old: Callable[..., Any] = getattr(thing, name)
    function = functools.wraps(old)(method)
    setattr(thing, name, MethodType(function, thing))
    return old


def restore_method(thing: object, name: str, old: Callable[..., Any]) -> None:
    """Restore the method that `replace_method` returned."""
    if getattr(old, "__func__", None) is getattr(type(thing), name, None):
        delattr(thing, name)  # it was the class's
    else:
        setattr(thing, name, old)


def replace_forward(module: nn.Module, forward: StandIn) -> None:
    """Replace the `forward` of a module; copies of it get the original."""
    vars(module)["forward"] = forward
    make_copies_plain(module)


class _Reduction(StandIn):
    """The `__reduce_ex__` of one object."""

    def __init__(self, thing: Any) -> None:
        self._thing = weakref.ref(thing)  # weak, so that the object does not hold itself

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the plain answer, for a class that copies its attributes by itself."""
        twin = memo[id(self.thing)]
        return partial(type(twin).__reduce_ex__, twin)

    @property
    def thing(self) -> Any:
        thing = self._thing()
        assert thing is not None, "an object that is gone cannot be copied"
        return thing


class _ModuleReduction(_Reduction):
    def __init__(self, module: nn.Module, settle: Callable[[], None]) -> None:
        super().__init__(module)
        self._settle = settle

    def __call__(self, protocol: int) -> Any:
        self._settle()
        return _with_state(_reduced(self.thing, protocol), _without_ours)


class _TensorReduction(_Reduction):
    def __call__(self, protocol: int) -> Any:
        return _plain_tensor(self.thing).__reduce_ex__(protocol)


class _TensorCopy(_Reduction):
    def __call__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self.thing), _plain_tensor(self.thing))  # type: ignore[no-any-return]


class _OptimizerReduction(_Reduction):
    def __call__(self, protocol: int) -> Any:
        optimizer = self.thing
        reduced = _reduced(optimizer, protocol)
        return _with_state(reduced, lambda state: {**state, "state": _whole_state(optimizer)})


def _whole_state(optimizer: torch.optim.Optimizer) -> defaultdict[Any, Any]:
    """Return a copy of an optimizer's state, also of entries that belong to no parameter."""
    common = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    return defaultdict(dict, {**full_optimizer_state(optimizer), **common})


def _reduced(thing: Any, protocol: int) -> Any:
    """Return the answer of the object's class."""
    answer: Any = type(thing).__reduce_ex__
    return answer(thing, protocol)


def _with_state(reduced: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Change the attributes that an object is rebuilt with, if it has such."""
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    return (*reduced[:2], change(reduced[2]), *reduced[3:])


def _without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in attributes.items():
        if not isinstance(value, StandIn):
            plain[name] = _without_hooks(value) if name.endswith("_hooks") else value
        elif value.own is not None:
            plain[name] = value.own
    return plain


def _without_hooks(hooks: Any) -> Any:
    if not isinstance(hooks, dict):
        return hooks
    return type(hooks)((key, hook) for key, hook in hooks.items() if not isinstance(hook, StandIn))


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        plain = tensor.detach().clone(memory_format=torch.preserve_format)
    if isinstance(tensor, nn.Parameter):
        plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
    vars(plain).update(
        {name: value for name, value in vars(tensor).items() if not isinstance(value, StandIn)}
    )
    return plain


class ForwardObserver(Protocol):
    """What is notified of forward passes."""

    def before_forward(self) -> None: ...
    def after_forward(self, output: Any) -> Any: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def agreed(self) -> AbstractContextManager[None]: ...
    def pull(self) -> None: ...
    def settle(self) -> None: ...
    def subscribe(self, after: int = -1) -> object: ...


# All names that `pl.distribute` adds to a model (docs/reference/training.md has a table). The last
# two are added if the model's class has none of that name; with `loss=` or a mesh they are needed.
ADDED_NAMES = ("no_sync", "agreed", "pull", "subscribe", "train_step", "forward_backward")
TRAINING_NAMES = ADDED_NAMES[-2:]


def refuse_collisions(model: nn.Module, *, needs_training_names: bool) -> None:
    """Raise UsageError if the model's class has an attribute that `pl.distribute` would hide."""
    names = ADDED_NAMES if needs_training_names else ADDED_NAMES[:-2]
    taken = [name for name in names if hasattr(type(model), name)]
    if taken:
        raise UsageError(
            f"distribute: {type(model).__name__} has an attribute {taken[0]!r}, which distribute"
            f" would hide: it adds {', '.join(names)} to the model. Rename it in your class, or"
            " distribute a module that contains the model"
        )


def attach(model: nn.Module, observer: ForwardObserver) -> None:
    """Notify `observer` of every forward pass of this model, and add `no_sync` to the model."""
    original = weakref.ref(model)

    def before(module: nn.Module, _: Any) -> None:
        # Inside torch.compile this must do nothing; parameters begin the backward pass then.
        if not torch.compiler.is_compiling() and module is original():
            observer.before_forward()

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling() and module is original():
            return observer.after_forward(output)  # None keeps the output
        return None

    for module in model.modules():
        make_copies_plain(module, observer.settle)
    model.register_forward_pre_hook(UncopiedHook(before, nothing))
    model.register_forward_hook(UncopiedHook(after, nothing))
    object.__setattr__(model, "no_sync", UncopiedHook(observer.no_sync, nullcontext))
    object.__setattr__(model, "agreed", UncopiedHook(observer.agreed, nullcontext))
    object.__setattr__(model, "pull", UncopiedHook(observer.pull, nothing))
    object.__setattr__(model, "subscribe", UncopiedHook(observer.subscribe, nothing))


def detach_output(output: Any) -> Any:
    """Return a model's output detached, so that no gradients reach the parameters."""

    def cut(thing: Any) -> Any:
        is_live = isinstance(thing, torch.Tensor) and thing.requires_grad
        return thing.detach().requires_grad_() if is_live else thing

    return tree_map(cut, output)


class UncopiedHook(StandIn):
    """A function that copies of its owner do not get.

    A class that copies its attributes by itself gets `in_copies` instead.
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
    """Do nothing; in the place of a hook."""


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
