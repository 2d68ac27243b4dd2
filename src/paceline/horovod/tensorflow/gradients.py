"""DistributedGradientTape: a tf.GradientTape whose gradients are reduced over all ranks.

with tf.GradientTape() as tape:
    loss = ...
tape = hvd.DistributedGradientTape(tape)
optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.frameworks.averages import as_torch
from paceline.horovod.arrays import as_array
from paceline.horovod.compression import Compression
from paceline.horovod.packed import PackedReduction
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, check_gradient_op
from paceline.horovod.tensorflow.host import on_host, tf
from paceline.horovod.tensorflow.operations import allreduce


class GradientReduction:
    """How the gradients of one optimizer or one place of a script are reduced."""

    def __init__(
        self,
        name: str,
        op: int,
        compression: Any,
        sparse_as_dense: bool,
        predivide: float,
        process_set: ProcessSet,
        scale: float = 1.0,
    ) -> None:
        check_gradient_op(op, predivide)
        self._name, self._op, self._process_set = name, op, process_set
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._packed = PackedReduction(name, op, process_set, predivide=predivide, scale=scale)

    def reduce(self, grads: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. None stays None, on all ranks; tf.IndexedSlices stay
        sparse, unless sparse_as_dense."""
        results = list(grads)
        dense = []
        for number, grad in enumerate(grads):
            if isinstance(grad, tf.IndexedSlices) and not self._sparse_as_dense:
                name = f"{self._name}.sparse.{number}"
                results[number] = allreduce(
                    grad, op=self._op, name=name, process_set=self._process_set
                )
            elif grad is not None:
                dense.append(number)
        sent = [self._compression.compress(tf.convert_to_tensor(grads[i])) for i in dense]
        tensors = [tensor for tensor, _ in sent]
        if not tensors:
            return results
        reduced = on_host(
            self._reduce_arrays,
            tensors,
            [tensor.dtype for tensor in tensors],
            [tensor.shape for tensor in tensors],
        )
        for number, tensor, (_, context) in zip(dense, reduced, sent, strict=True):
            results[number] = self._compression.decompress(tensor, context)
        return results

    def _reduce_arrays(self, *values: np.ndarray) -> list[np.ndarray]:
        # TensorFlow may keep an array's memory, so it gets copies.
        return [as_array(one).copy() for one in self._packed.reduce([as_torch(v) for v in values])]


class _LocalSources:
    """Variables of which every rank has its own: their gradients are not reduced."""

    def __init__(self, process_set: ProcessSet, scales: bool) -> None:
        self._known: set[Any] = set()
        self._process_set, self._scales = process_set, scales

    def add(self, variable: Any) -> None:
        self._known.add(_key(variable))

    def has(self, variable: Any) -> bool:
        return _key(variable) in self._known

    def scaled(self, grad: Any) -> Any:
        """Return a local gradient, which counts as much as a reduced one."""
        return grad / self._process_set.named.size if self._scales and grad is not None else grad


def _key(variable: Any) -> Any:
    # A keras.Variable has one of TensorFlow.
    return variable.ref() if hasattr(variable, "ref") else variable.value.ref()


_by_settings: dict[Any, GradientReduction] = {}


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape with the recording of `gradtape` and a `gradient` that reduces over all ranks.

    Gradients travel in buckets; `num_groups`, `groups` and the devices have no effect.
    """
    del device_dense, device_sparse, num_groups, groups
    if not isinstance(gradtape, tf.GradientTape):
        raise UsageError(
            f"DistributedGradientTape: expected a tf.GradientTape, got {type(gradtape).__name__}"
        )
    if isinstance(gradtape, _Reducing):
        raise UsageError("DistributedGradientTape: this tape reduces gradients already")
    settings = (compression, sparse_as_dense, int(op), gradient_predivide_factor, process_set)
    # A script makes a tape in every step: those with the same settings share buckets and name.
    reduction = _by_settings.get(settings)
    if reduction is None:
        reduction = GradientReduction(
            "DistributedGradientTape",
            op,
            compression,
            sparse_as_dense,
            gradient_predivide_factor,
            process_set,
        )
        _by_settings[settings] = reduction
    base = type(gradtape)
    kind: Any = type(base.__name__, (_Reducing, base), {"__module__": base.__module__})
    tape = kind.__new__(kind)
    tape.__dict__ = gradtape.__dict__  # one recording, which may not have begun yet
    tape._hvd_reduction = reduction
    tape._hvd_local = _LocalSources(process_set, scale_local_gradients)
    return tape


class _Reducing:
    """What is added to the class of a tape."""

    _hvd_reduction: GradientReduction
    _hvd_local: _LocalSources

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of this variable: every rank has its own."""
        self._hvd_local.add(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **more: Any,
    ) -> Any:
        """Return the reduced gradients, in the structure of `sources`."""
        del use_generic_names
        grads = super().gradient(target, sources, output_gradients, **more)  # type: ignore[misc]
        leaves = tf.nest.flatten(grads)
        variables = tf.nest.flatten(sources)
        shared = [i for i, one in enumerate(variables) if not self._hvd_local.has(one)]
        for i, one in enumerate(leaves):
            if i not in shared:
                leaves[i] = self._hvd_local.scaled(one)
        for i, one in zip(
            shared, self._hvd_reduction.reduce([leaves[i] for i in shared]), strict=True
        ):
            leaves[i] = one
        return tf.nest.pack_sequence_as(grads, leaves)


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a DistributedGradientTape that leaves out the variables of some layers."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in local_layers or ():
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
