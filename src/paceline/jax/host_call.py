"""host_call: run a Python function on the host in the middle of a compiled JAX computation.

    XLA -- custom call (host_call.cc) --> function(inputs, outputs): numpy views of XLA's memory

Inputs are donated to the outputs of the same place, so that XLA mostly passes the same memory for
both. Without the library the function runs in an ordered `io_callback`, which copies. Never in a
`pure_callback`: JAX may drop or repeat that, and then one worker waits for ever.

XLA may run two custom calls of one computation in any order, if no data flows between them. A step
that exchanges more than once passes everything to one call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.frameworks.requirement import require
from paceline.jax import host_call_library

Arrays = list[np.ndarray]
Function = Callable[[Arrays, Arrays], None]  # reads the first, writes the second

_calls: list[tuple[Function, list[Any], list[Any]]] = []  # function, shapes in, shapes out
_numbers: dict[Any, int] = {}


def host_call(
    function: Function, inputs: Sequence[Any], like: Sequence[Any] | None = None
) -> list[Any]:
    """Return what `function` writes, with the shapes and dtypes of `like`; default: the inputs'."""
    jax = require("jax")
    outputs = inputs if like is None else like
    shapes_in = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    shapes_out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    if not shapes_out:
        return []
    target = _target()
    if target is None:
        return _through_callback(jax, function, list(inputs), shapes_out)
    number = _number_of(function, shapes_in, shapes_out)
    aliases = {i: i for i in range(len(shapes_in))} if like is None else {}
    call = jax.ffi.ffi_call(target, shapes_out, has_side_effect=True, input_output_aliases=aliases)
    return list(call(*inputs, number=np.int64(number)))


def _number_of(function: Function, shapes_in: list[Any], shapes_out: list[Any]) -> int:
    """Return the number of this function with these shapes: one, however often it is traced."""
    sizes = tuple((x.shape, str(x.dtype)) for x in (*shapes_in, *shapes_out))
    key = (function, len(shapes_in), sizes)
    if key not in _numbers:
        _numbers[key] = len(_calls)
        _calls.append((function, shapes_in, shapes_out))
    return _numbers[key]


@functools.cache
def _target() -> str | None:
    return host_call_library.load(require("jax"), _handle)


def _handle(number: int, inputs: list[int], outputs: list[int]) -> None:
    """Answer the custom call: addresses become arrays."""
    function, shapes_in, shapes_out = _calls[number]
    function(_views(inputs, shapes_in), _views(outputs, shapes_out))


def _views(addresses: list[int], shapes: list[Any]) -> Arrays:
    return [_view(address, shape) for address, shape in zip(addresses, shapes, strict=True)]


def _view(address: int, shape: Any) -> np.ndarray:
    dtype = np.dtype(shape.dtype)
    size = int(np.prod(shape.shape)) * dtype.itemsize
    if not size:
        return np.empty(shape.shape, dtype)
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape.shape)


def _through_callback(
    jax: Any, function: Function, inputs: list[Any], shapes_out: list[Any]
) -> list[Any]:
    def run(*arrays: Any) -> Arrays:
        outs = [np.empty(shape.shape, shape.dtype) for shape in shapes_out]
        function([np.asarray(array) for array in arrays], outs)
        return outs

    return list(jax.experimental.io_callback(run, shapes_out, *inputs, ordered=True))
