"""KerasReduction: what a DistributedOptimizer of Keras does to the gradients of a step.

paceline.keras swaps the class of an optimizer for one that calls an exchange. This exchange reduces
gradients by named operations: ranks that have joined contribute zeros, and a process set may be
smaller than the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.frameworks.averages import as_torch
from paceline.frameworks.requirement import require
from paceline.horovod.arrays import as_array
from paceline.horovod.host_errors import keep_errors
from paceline.horovod.packed import PackedReduction
from paceline.horovod.process_sets import ProcessSet

Reduce = Callable[[Sequence[Any]], list[Any]]


class KerasReduction:
    """One optimizer's gradients, on any backend of Keras."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        op: int,
        compression: Any,
        sparse_as_dense: bool,
        predivide: float,
        process_set: ProcessSet,
        scale: float,
    ) -> None:
        self.process_set = process_set
        self.has_open_steps = False  # of an epoch of fit()
        self._optimizer, self._compression = optimizer, compression
        backend = require("keras").config.backend()
        if backend == "tensorflow":
            from paceline.horovod.tensorflow.gradients import GradientReduction

            self._reduce: Reduce = GradientReduction(
                name, op, compression, sparse_as_dense, predivide, process_set, scale
            ).reduce
            return
        packed = PackedReduction(name, op, process_set, predivide=predivide, scale=scale)
        through: Any = {"jax": _ThroughXla, "torch": _Directly}.get(backend)
        if through is None:
            raise UsageError(f"KERAS_BACKEND is {backend}; expected tensorflow, torch or jax")
        self._reduce = self._dense(through(packed).reduce)

    @property
    def accumulates(self) -> bool:
        """Whether gradients are reduced once for several batches."""
        return bool(getattr(self._optimizer, "gradient_accumulation_steps", None))

    def move_to(self, optimizer: Any) -> None:
        """Belong to another optimizer: a LossScaleOptimizer around the first one."""
        self._optimizer = optimizer

    def apply(self, _: Any, update: Callable[..., Any], grads: Any, variables: Any) -> None:
        """Reduce, and update: `optimizer.apply(grads, variables)` on all ranks."""
        grads = list(grads)
        update(grads if self.accumulates else self.mean(grads), variables)

    def mean(self, grads: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients."""
        return self._reduce(list(grads))

    def after(self, values: list[Any]) -> list[Any]:
        """Return the values after an update as they are."""
        return values

    def _dense(self, reduce: Reduce) -> Reduce:
        """Return a function that compresses, reduces what is not None, and decompresses."""

        def run(grads: Sequence[Any]) -> list[Any]:
            present = [i for i, grad in enumerate(grads) if grad is not None]
            sent = [self._compression.compress(grads[i]) for i in present]
            results = list(grads)
            reduced = reduce([tensor for tensor, _ in sent]) if sent else []
            for i, tensor, (_, context) in zip(present, reduced, sent, strict=True):
                results[i] = self._compression.decompress(tensor, context)
            return results

        return run


class _Directly:
    """torch: nothing is compiled."""

    def __init__(self, packed: PackedReduction) -> None:
        self._packed = packed

    def reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if torch.compiler.is_compiling():
            raise UsageError(
                "DistributedOptimizer: the model was compiled with jit_compile=True, and"
                " torch.compile would leave out the exchange; use compile(..., jit_compile=False)"
            )
        return [one.clone() for one in self._packed.reduce([t.detach() for t in tensors])]


class _ThroughXla:
    """JAX: a call from inside of the compiled step."""

    def __init__(self, packed: PackedReduction) -> None:
        self._packed = packed

    def reduce(self, tensors: Sequence[Any]) -> list[Any]:
        from paceline.jax.host_call import host_call

        return host_call(self._write, tensors)

    @keep_errors
    def _write(self, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        reduced = self._packed.reduce([as_torch(array) for array in inputs])
        for output, result in zip(outputs, reduced, strict=True):
            np.copyto(output, as_array(result))
