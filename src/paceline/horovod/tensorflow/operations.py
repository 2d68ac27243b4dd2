"""Operations on tensors of TensorFlow: allreduce, allgather, broadcast, alltoall, reducescatter.

They work eagerly and in tf.function (not with jit_compile=True: XLA cannot call the host), and
gradients flow through them. `device_dense` and `device_sparse` have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.horovod import arrays
from paceline.horovod.compression import Compression
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, Sum, choose_op
from paceline.horovod.tensorflow.host import label_for, on_host, tf

Scales = tuple[float, float]


def _grad_name(label: str | None) -> str | None:
    return None if label is None else f"{label}.grad"


# -- allreduce --------------------------------------------------------------------------------


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the reduced tensor of all ranks; the mean by default.

    For tf.IndexedSlices the slices of all ranks are gathered.
    """
    del device_dense, device_sparse, ignore_name_scope
    op = choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _reduce_slices(tensor, name, op, process_set)
    sent, context = compression.compress(tf.convert_to_tensor(tensor))
    reduced = _allreduce(sent, name, op, (prescale_factor, postscale_factor), process_set)
    return compression.decompress(reduced, context)


def _allreduce(
    tensor: Any, name: str | None, op: int, scales: Scales, process_set: ProcessSet
) -> Any:
    label = label_for("Allreduce", tensor, name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(x: Any) -> Any:
        [y] = on_host(
            lambda array: [arrays.allreduce(array, label, op, scales, process_set)],
            [x],
            [x.dtype],
            [x.shape],
        )
        return y, lambda dy: _allreduce(dy, _grad_name(label), op, scales, process_set)

    return forward(tensor)


def _reduce_slices(slices: Any, name: str | None, op: int, process_set: ProcessSet) -> Any:
    label = label_for("Allreduce", slices.values, name)

    def gather(values: np.ndarray, indices: np.ndarray) -> list[np.ndarray]:
        base = label or process_set.next_name("sparse")
        values = arrays.allgather(values, f"{base}.values", process_set)
        indices = arrays.allgather(indices, f"{base}.indices", process_set)
        if op == Average:
            values = np.asarray(values / process_set.named.size, values.dtype)
        return [values, indices]

    values, indices = on_host(
        gather,
        [slices.values, slices.indices],
        [slices.values.dtype, slices.indices.dtype],
        [[None, *slices.values.shape[1:]], [None]],
    )
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the reduced tensors; the means by default."""
    del device_dense, device_sparse, ignore_name_scope
    if not tensors:
        return []
    op, scales = choose_op(op, average), (prescale_factor, postscale_factor)
    sent = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    reduced = _grouped_allreduce([tensor for tensor, _ in sent], name, op, scales, process_set)
    return [compression.decompress(r, c) for r, (_, c) in zip(reduced, sent, strict=True)]


def _grouped_allreduce(
    tensors: list[Any], name: str | None, op: int, scales: Scales, process_set: ProcessSet
) -> list[Any]:
    label = label_for("GroupedAllreduce", tensors[0], name)

    def run(*values: np.ndarray) -> list[np.ndarray]:
        base = label or process_set.next_name("grouped_allreduce")
        return arrays.grouped_allreduce(list(values), base, op, scales, process_set)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(*xs: Any) -> Any:
        ys = on_host(run, xs, [x.dtype for x in xs], [x.shape for x in xs])

        def backward(*grads: Any) -> list[Any]:
            return _grouped_allreduce(list(grads), _grad_name(label), op, scales, process_set)

        return ys, backward

    return list(forward(*tensors))


# -- allgather, broadcast ---------------------------------------------------------------------


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all ranks, concatenated; their first dimensions may differ."""
    del ignore_name_scope
    tensor = tf.convert_to_tensor(tensor)
    label = label_for("Allgather", tensor, name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(x: Any) -> Any:
        [y] = on_host(
            lambda array: [arrays.allgather(array, label, process_set)],
            [x],
            [x.dtype],
            [[None, *x.shape[1:]]],
        )

        def my_rows(grad: np.ndarray, count: np.ndarray) -> list[np.ndarray]:
            base = label or process_set.next_name("allgather_grad")
            mean = arrays.allreduce(grad, f"{base}.grad", Average, (1.0, 1.0), process_set)
            counts = arrays.allgather(count, f"{base}.rows", process_set)
            first = int(counts[: process_set.named.rank].sum())
            return [mean[first : first + int(count[0])].copy()]

        def backward(dy: Any) -> Any:
            [dx] = on_host(my_rows, [dy, tf.shape(x)[:1]], [x.dtype], [x.shape])
            return dx

        return y, backward

    return forward(tensor)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return for each tensor the concatenation over all ranks."""
    del ignore_name_scope
    return [
        allgather(tensor, None if name is None else f"{name}.{number}", process_set=process_set)
        for number, tensor in enumerate(tensors)
    ]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor on every rank."""
    del ignore_name_scope
    tensor = tf.convert_to_tensor(tensor)
    label = label_for("Broadcast", tensor, name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(x: Any) -> Any:
        [y] = on_host(
            lambda array: [arrays.broadcast(array, root_rank, label, process_set)],
            [x],
            [x.dtype],
            [x.shape],
        )

        def root_mean(grad: np.ndarray) -> list[np.ndarray]:
            name = _grad_name(label)
            mean = arrays.allreduce(grad, name, Average, (1.0, 1.0), process_set)
            is_root = process_set.named.rank == process_set.member_of(root_rank, "broadcast")
            return [mean if is_root else np.zeros_like(mean)]

        return y, lambda dy: on_host(root_mean, [dy], [x.dtype], [x.shape])[0]

    return forward(tensor)


# -- alltoall, reducescatter ------------------------------------------------------------------


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[j]` rows to rank j; return the received rows, with `splits` also how many came
    from each rank."""
    del ignore_name_scope
    tensor = tf.convert_to_tensor(tensor)
    label = label_for("Alltoall", tensor, name)
    given = [] if splits is None else [tf.cast(tf.convert_to_tensor(splits), tf.int32)]

    def exchange(rows: np.ndarray, *counts: np.ndarray) -> list[np.ndarray]:
        wanted = counts[0] if counts else None
        return list(arrays.alltoall(rows, wanted, label, process_set))

    def back(grad: np.ndarray, received: np.ndarray, count: np.ndarray) -> list[np.ndarray]:
        rows, _ = arrays.alltoall(grad, received, _grad_name(label), process_set)
        unsent = np.zeros((int(count) - len(rows), *rows.shape[1:]), rows.dtype)
        return [np.concatenate([rows, unsent])]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(x: Any) -> Any:
        y, received = on_host(
            exchange, [x, *given], [x.dtype, tf.int32], [[None, *x.shape[1:]], [None]]
        )

        def backward(dy: Any, _: Any = None) -> Any:
            return on_host(back, [dy, received, tf.shape(x)[0]], [x.dtype], [x.shape])[0]

        return (y, received), backward

    rows, received = forward(tensor)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the reduced tensor."""
    del device_dense, ignore_name_scope
    sent, context = compression.compress(tf.convert_to_tensor(tensor))
    scales = (prescale_factor, postscale_factor)
    label = label_for("Reducescatter", sent, name)

    def gather(grad: np.ndarray) -> list[np.ndarray]:
        factor = scales[0] * scales[1] * (process_set.named.size if op == Sum else 1)
        scaled = np.asarray(grad * factor, grad.dtype)
        return [arrays.allgather(scaled, _grad_name(label), process_set)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(x: Any) -> Any:
        [y] = on_host(
            lambda array: [arrays.reducescatter(array, label, op, scales, process_set)],
            [x],
            [x.dtype],
            [[None, *x.shape[1:]]],
        )
        return y, lambda dy: on_host(gather, [dy], [x.dtype], [x.shape])[0]

    return compression.decompress(forward(sent), context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Return this rank's rows of each reduced tensor."""
    del device_dense, ignore_name_scope
    return [
        reducescatter(
            tensor,
            compression=compression,
            op=op,
            name=None if name is None else f"{name}.{number}",
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for number, tensor in enumerate(tensors)
    ]
