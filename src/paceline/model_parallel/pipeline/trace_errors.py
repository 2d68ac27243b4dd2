"""What a forward pass must not do between its layers if it is to be recorded.

A recorded pass is replayed on other inputs. So nothing in it may depend on the values of tensors:
neither decisions, nor Python numbers, nor sizes of other tensors.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

# Functions that turn values of tensors into Python values, or into sizes of other tensors.
_READS_VALUES = {
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__"),
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
}
_READS_SIZES = {
    *("shape", "size", "__len__", "numel", "nelement", "stride", "storage_offset", "is_contiguous"),
    *("unbind", "chunk", "split", "tensor_split"),  # how many come out
}
_OWN_FILES = str(Path(__file__).parent)
_TORCH_FILES = str(Path(torch.__file__).parent)


class CannotRecord(Exception):
    """The forward of an opened module does what cannot be recorded."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = f"{why}{_calling_line()}"
        self.module: str | None = None  # the innermost opened module, set on the way out


class PythonRandom:
    """Notices numbers drawn from Python's or numpy's generators: every replay would repeat them."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def check(self) -> None:
        """Raise CannotRecord if a number was drawn since."""
        if self._python != random.getstate() or self._numpy != _numpy_state():
            raise CannotRecord(
                "it draws random numbers from Python or numpy between layers, before this line"
            )


def name_of(func: Any) -> str:
    """Return a function's name; for the getter of an attribute: the attribute's."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    return str(name)


def reads_sizes(name: str) -> bool:
    """Return whether a function returns sizes, which are constants of the recorded pass."""
    return name in _READS_SIZES


def reads_values(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a function's result, or its size, depends on the values of tensors."""
    if name == "__getitem__" and len(args) == 2:
        index = pytree.tree_leaves(args[1])
        return any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in index)
    if name == "where":
        return len(args) == 1
    if name == "repeat_interleave":
        return len(args) > 1 and isinstance(args[1], torch.Tensor)
    return name in _READS_VALUES


def check_constant(leaf: Any) -> None:
    """Raise CannotRecord for an argument that contains tensors: every replay would repeat them."""
    if isinstance(leaf, slice):
        if _has_tensor((leaf.start, leaf.stop, leaf.step)):
            raise CannotRecord("it slices by the values of a tensor")
    elif isinstance(leaf, nn.Module | type) or not hasattr(leaf, "__dict__"):
        return
    elif _has_tensor(vars(leaf)):
        raise CannotRecord(
            f"it passes tensors inside of a {type(leaf).__name__}, which cannot be looked into "
            "(torch.utils._pytree.register_pytree_node makes it known)"
        )


@contextmanager
def new_objects() -> Iterator[Callable[[object], bool]]:
    """Yield a function that returns whether an object was created inside of the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect(0)  # older objects leave generation 0
    try:
        yield lambda one: any(one is new for new in gc.get_objects(0))
    finally:
        if was_enabled:
            gc.enable()


def _numpy_state() -> tuple[bytes, int]:
    state: Any = np.random.get_state(legacy=True)  # a tuple, for the generator of np.random
    return state[1].tobytes(), state[2]  # the words, and how many of them are used up


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(tree))


def _calling_line() -> str:
    """Return the line of the user's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_OWN_FILES, _TORCH_FILES)):
            return f"\n    {frame.filename}:{frame.lineno}: {frame.line}"
    return ""
