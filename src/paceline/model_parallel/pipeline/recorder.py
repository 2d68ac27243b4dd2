"""ForwardRecorder: runs a forward pass and records every call of a layer or a torch function.

It is a mode of torch (`TorchFunctionMode`), so it sees what the forward does to tensors, and the
forward sees real tensors: sizes, dtypes and loops over them are plain Python. Only a decision that
depends on the *values* of tensors cannot be recorded; that raises `CannotRecord`.

It also records which memory a tensor lies in and which calls write to it, because a stage boundary
separates tensors that share memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.function import _SingleLevelFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.comm.devices import random_state_of
from paceline.errors import UsageError
from paceline.model_parallel.pipeline.graph import (
    Arguments,
    Depends,
    ForwardPass,
    Node,
    Shape,
    Value,
)
from paceline.model_parallel.pipeline.trace_errors import (
    CannotRecord,
    PythonRandom,
    check_constant,
    name_of,
    new_objects,
    reads_sizes,
    reads_values,
)


class ForwardRecorder(TorchFunctionMode):
    """Records one forward pass as a `ForwardPass`."""

    def __init__(
        self, model: nn.Module, opened: set[str], device: str, inside: AbstractContextManager[Any]
    ) -> None:
        super().__init__()
        self.recorded = ForwardPass()
        self.is_on = False
        self._opened = opened
        self._names = {id(module): name for name, module in model.named_modules()}
        self._state: dict[int, tuple[str, Depends, torch.Tensor]] = {}
        self._values = WeakTensorKeyDictionary()
        self._memories: dict[StorageWeakRef, int] = {}
        self._keep: list[torch.Tensor] = []  # keeps them alive, so that no id is reused
        self.is_new: Callable[[object], bool] = lambda _: False  # created during the pass
        self._is_checkpointed = False
        self._drawn = PythonRandom()
        self._thread = threading.get_ident()
        self._device = device
        self._inside = inside  # the context in which layers run
        self._autocast = self._autocast_now()

    def add_state(
        self, name: str, original: torch.Tensor, used: torch.Tensor, *, is_parameter: bool
    ) -> None:
        """Register a parameter or buffer; `used` is used in place of `original`."""
        kind = Depends.PARAMETER if is_parameter else Depends.BUFFER
        self._state.setdefault(id(original), (name, kind, used))
        self._state.setdefault(id(used), (name, kind, used))
        self._keep += [original, used]

    def add_input(self, tensor: torch.Tensor) -> None:
        """Register the next tensor of the inputs."""
        node = self._add(Node("input", None, _arguments((), {}), Depends.INPUT))
        self.recorded.inputs.append(self._bind(tensor, node, 0, tensor.requires_grad))

    def set_outputs(self, outputs: Any) -> None:
        """End the pass with what the model returned."""
        self.is_on = False
        self._drawn.check()
        leaves, self.recorded.output_spec = pytree.tree_flatten(outputs)
        self.recorded.outputs = [
            self._value_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]

    # -- what is intercepted ------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        return self._call(func, args, kwargs)

    def call_module(
        self, run: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Record a layer, or run a module that is opened."""
        if not self.is_on or threading.get_ident() != self._thread:
            return run(module, *args, **kwargs)
        name = self._names.get(id(module))
        if name is None or name in self._opened:
            try:
                return run(module, *args, **kwargs)
            except CannotRecord as error:
                if error.module is None:
                    error.module = name
                raise

        self._drawn.check()

        def run_layer(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._inside:
                    return run(module, *args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UsageError(
                    f"layer {name} ({type(module).__name__}) needs the values of tensors "
                    f"({error.func}), and the model, or the example, is on the meta device, "
                    "without values; trace it with data"
                ) from error

        result = self._record("layer", name, run_layer, args, kwargs)
        self._drawn = PythonRandom()  # layers may draw random numbers
        return result

    def call_function(self, run: Callable[..., Any], kind: Any, args: Any) -> Any:
        """Record a call of an autograd function as one call."""
        if not self.is_on or threading.get_ident() != self._thread:
            return run(*args)
        if kind is CheckpointFunction:
            # torch.utils.checkpoint(module, ...) with use_reentrant=True: what it calls matters.
            module, _, *inputs = args
            was, self._is_checkpointed = self._is_checkpointed, True
            try:
                return module(*inputs)
            finally:
                self._is_checkpointed = was
        if any(isinstance(one, nn.Module) for one in args):
            raise CannotRecord(f"it hides a call of a module in {kind.__name__}.apply")
        return self._record("call", kind.apply, run, args, {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name == "_set_grad_enabled":  # no_grad calls it; its effect must last
            return func(*args, **kwargs)
        if reads_sizes(name):
            self.recorded.reads_sizes = True
        if reads_values(name, args) and self._depends(self._arguments(args, kwargs)):
            raise CannotRecord(f"it depends on the values of a tensor ({name})")
        return self._record("call", func, func, args, kwargs)

    # -- recording ----------------------------------------------------------------------------

    def _record(
        self,
        kind: Any,
        target: Any,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.is_on = False  # calls inside of this one are not recorded
        try:
            arguments = self._arguments(args, kwargs)
            depends = self._depends(arguments)
            args, kwargs = self._usable(args, kwargs)
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            versions = [one._version for one in tensors]
            random_state = None if depends or kind == "layer" else self._random_state()
            # Layers may need gradients inside; glue is run for its values and sizes only.
            with torch.set_grad_enabled(kind == "layer" and torch.is_grad_enabled()):
                result = run(*args, **kwargs)
            if random_state is not None and not torch.equal(random_state, self._random_state()):
                depends |= Depends.RANDOM
            changed = {
                id(one)
                for one, before in zip(tensors, versions, strict=True)
                if one._version != before
            }
            return self._note(kind, target, arguments, depends, result, tensors, changed)
        finally:
            self.is_on = True

    def _note(
        self,
        kind: Any,
        target: Any,
        arguments: Arguments,
        depends: Depends,
        result: Any,
        tensors: list[torch.Tensor],
        changed: set[int],
    ) -> Any:
        leaves, spec = pytree.tree_flatten(result)
        if not changed and kind == "call" and not any(isinstance(x, torch.Tensor) for x in leaves):
            return result
        node = Node(kind, target, arguments, depends, grad=torch.is_grad_enabled())
        node.mutates = frozenset(self._memory_of(one) for one in tensors if id(one) in changed)
        node.is_checkpointed = kind == "layer" and self._checkpointed_now()
        autocast = self._autocast_now()
        node.autocast = autocast if autocast != self._autocast else None
        index = self._add(node)
        needs_grad = node.grad and any(self.recorded.needs_grad(v) for _, v in arguments.values)
        if needs_grad and changed:
            self.recorded.differentiable |= node.mutates
        known = {id(one) for one in tensors}
        for item, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or id(leaf) in changed:
                continue  # a tensor that was written to stays the same value
            own_needs = needs_grad or leaf.requires_grad
            if id(leaf) in known or leaf.requires_grad:
                # A new object, because it is a new value (`x.float()` of a float).
                leaf = leaves[item] = leaf.detach()
            self._bind(leaf, index, item, own_needs and name_of(target) not in ("detach", "data"))
        return pytree.tree_unflatten(leaves, spec)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        arguments = _arguments(args, kwargs)
        for position, leaf in enumerate(arguments.leaves):
            if isinstance(leaf, torch.Tensor):
                arguments.leaves[position] = self._value_of(leaf)
            else:
                check_constant(leaf)
        return Arguments(arguments.leaves, arguments.spec)

    def _usable(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments with the registered stand-ins of parameters and buffers."""

        def used(leaf: Any) -> Any:
            known = self._state.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            return leaf if known is None else known[2]

        return pytree.tree_map(used, (args, kwargs))

    def _value_of(self, tensor: torch.Tensor) -> Value:
        known: Value | None = self._values.get(tensor)
        if known is not None:
            return known
        if id(tensor) in self._state:
            name, depends, tensor = self._state[id(tensor)]
            known = self._values.get(tensor)
            if known is not None:
                return known
            node = Node("state", name, _arguments((), {}), depends)
        else:
            self._check_unknown(tensor)
            node = Node("constant", tensor, _arguments((), {}), Depends.NOTHING)
        return self._bind(tensor, self._add(node), 0, tensor.requires_grad)

    def _check_unknown(self, tensor: torch.Tensor) -> None:
        """Raise CannotRecord for a tensor that was created in the pass by no recorded call."""
        self._keep.append(tensor)
        if self.is_new(tensor):
            raise CannotRecord(
                f"it uses a tensor of shape {tuple(tensor.shape)} that was created by code "
                "that cannot be recorded (torch.func, scripted functions, extensions, from_numpy)"
            )
        if tensor.device.type == "meta":
            raise CannotRecord(
                f"it uses a tensor of shape {tuple(tensor.shape)} on the meta device that is no "
                "parameter or buffer, so it never gets data (register_buffer makes it a buffer)"
            )

    def _add(self, node: Node) -> int:
        self.recorded.nodes.append(node)
        return len(self.recorded.nodes) - 1

    def _bind(self, tensor: torch.Tensor, node: int, item: int, needs_grad: bool) -> Value:
        value = Value(node, item)
        self._values[tensor] = value
        at = self.recorded.nodes[node]
        at.shapes[item] = Shape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        at.memory[item] = self._memory_of(tensor)
        if needs_grad and (tensor.is_floating_point() or tensor.is_complex()):
            at.needs_grad.add(item)
        return value

    def _memory_of(self, tensor: torch.Tensor) -> int:
        storage = StorageWeakRef(tensor.untyped_storage())
        return self._memories.setdefault(storage, len(self._memories))

    def _depends(self, arguments: Arguments) -> Depends:
        depends = Depends.NOTHING
        for _, value in arguments.values:
            depends |= self.recorded.nodes[value.node].depends
        return depends

    def _random_state(self) -> torch.Tensor:
        state = torch.get_rng_state()
        if self._device == "cpu":
            return state
        return torch.cat([state, random_state_of(torch.device(self._device))])

    def _checkpointed_now(self) -> bool:
        if self._is_checkpointed:
            return True
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", "")

    def _autocast_now(self) -> tuple[str, torch.dtype, bool]:
        return (
            self._device,
            torch.get_autocast_dtype(self._device),
            torch.is_autocast_enabled(self._device),
        )


@contextmanager
def recording(recorder: ForwardRecorder) -> Iterator[None]:
    """Pass calls of modules, autograd functions and torch functions to the recorder."""
    call = nn.Module.__call__

    def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(call, module, args, kwargs)

    def recorded_apply(kind: Any, *args: Any) -> Any:
        return recorder.call_function(super(_SingleLevelFunction, kind).apply, kind, args)

    nn.Module.__call__ = recorded_call  # type: ignore[method-assign]
    _SingleLevelFunction.apply = classmethod(recorded_apply)  # type: ignore[attr-defined]
    recorder.is_on = True
    try:
        with new_objects() as recorder.is_new, recorder:
            yield
    finally:
        recorder.is_on = False
        nn.Module.__call__ = call  # type: ignore[method-assign]
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]  # it was inherited


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return Arguments(*pytree.tree_flatten((tuple(args), kwargs)))
