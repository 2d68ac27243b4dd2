"""How arrays leave a compiled step of Keras, and results come back, for each backend.

TensorFlow   tf.numpy_function inside of the graph
JAX          an XLA custom call (paceline/jax/host_call.py)
torch        nothing is compiled: a plain call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.frameworks.requirement import require

# Gets arrays, returns arrays: views are good until the next call.
Function = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


class TensorFlowHost:
    """TensorFlow: the step is a graph."""

    def __init__(self) -> None:
        self._tf = require("tensorflow")

    def check(self, model: Any) -> str | None:
        """Return why this model's steps cannot call the host."""
        if model.jit_compile is True:
            return (
                "the model was compiled with jit_compile=True, and TensorFlow's XLA cannot call"
                " the host; use compile(..., jit_compile=False)"
            )
        return None

    def call(self, function: Function, inputs: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        """Return what the function returns, with the shapes and dtypes of `like`."""
        tf = self._tf
        dense = [tf.convert_to_tensor(x) for x in inputs]  # IndexedSlices become dense
        dtypes = [tf.as_dtype(x.dtype) for x in like]
        results = tf.numpy_function(lambda *arrays: list(function(arrays)), dense, dtypes)
        for result, one in zip(results, like, strict=True):
            result.set_shape(one.shape)
        return list(results)

    def value_of(self, variable: Any) -> Any:
        return variable.value

    def outside_graph(self) -> Any:
        """Return a context in which variables can be read and set."""
        return self._tf.init_scope()

    def settle(self, variables: Sequence[Any]) -> None:
        """Wait until all steps that were started are done: for TensorFlow they are."""


class JaxHost:
    """JAX: the step is compiled by XLA."""

    def __init__(self) -> None:
        self._jax = require("jax")

    def check(self, model: Any) -> str | None:  # noqa: ARG002
        return None

    def call(self, function: Function, inputs: Sequence[Any], like: Sequence[Any]) -> list[Any]:
        from paceline.jax.host_call import host_call

        # Results of the same shapes may take the memory of the inputs.
        return host_call(_Writing(function), inputs, None if like is inputs else like)

    def value_of(self, variable: Any) -> Any:
        return variable.value

    def outside_graph(self) -> Any:
        if not self._jax.core.trace_ctx.is_top_level():
            raise UsageError(
                "paceline.keras: the first step of a model on JAX must begin in fit(); call"
                " paceline.keras.distribute(model) when the model is built (it has a keras.Input,"
                " or model.build(shape) was called)"
            )
        return nullcontext()

    def settle(self, variables: Sequence[Any]) -> None:
        """Wait until all steps that were started are done: XLA runs them in the background."""
        self._jax.block_until_ready([variable.value for variable in variables])
        self._jax.effects_barrier()


class _Writing:
    """A function that writes its results where XLA wants them. Equal for the same function."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Writing) and other._function == self._function

    def __hash__(self) -> int:
        return hash(self._function)

    def __call__(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        for output, result in zip(outputs, self._function(inputs), strict=True):
            np.copyto(output, result.reshape(output.shape))


Host = TensorFlowHost | JaxHost
