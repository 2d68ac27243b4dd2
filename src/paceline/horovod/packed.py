"""PackedReduction: reduces a step's gradients in a few named operations instead of one for each.

The gradients are copied into buckets in engine memory, which the engine needs not copy again. A
bucket is sent as soon as it is full, while the next one is packed. As named operations they
get zeros from ranks that have joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.shared_memory import allocate
from paceline.horovod import session
from paceline.horovod.handles import Pending, Several
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.torch import start

_BUCKET_BYTES = 16 << 20
_Shapes = tuple[tuple[torch.dtype, torch.Size], ...]


class _Bucket:
    """One flat tensor, and the places of the gradients in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.num_elements = dtype, 0
        self.places: list[tuple[int, int, torch.Size]] = []  # gradient, offset, shape

    def add(self, number: int, shape: torch.Size) -> None:
        self.places.append((number, self.num_elements, shape))
        self.num_elements += shape.numel()

    def allocate(self) -> None:
        engine = session.current().fabric.engine
        self.flat = allocate(engine, (self.num_elements,), self.dtype)
        self.views = [
            (number, self.flat[offset : offset + shape.numel()].view(shape))
            for number, offset, shape in self.places
        ]
        self.described = str([list(shape) for _, _, shape in self.places])  # alike on all ranks


class PackedReduction:
    """Reduces lists of tensors under one name. One call at a time.

    scale    what reduced gradients are multiplied by, besides what `op` means
    """

    def __init__(
        self,
        name: str,
        op: int,
        process_set: ProcessSet,
        *,
        predivide: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        self._name, self._op, self._process_set = name, op, process_set
        self._scales = (1.0 / predivide, predivide * scale)
        self._plans: dict[_Shapes, list[_Bucket]] = {}
        self._incarnation = -1

    def reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the reduced tensors: views that are valid until the next call. Blocks."""
        if session.current().elastic.is_joining:
            # This worker is new. Until elastic.run its steps only build the optimizer's state.
            return list(tensors)
        buckets = self._buckets_for(tuple((one.dtype, one.shape) for one in tensors))
        pending: list[Pending] = []
        with torch.no_grad():
            for position, bucket in enumerate(buckets):
                for number, view in bucket.views:
                    view.copy_(tensors[number])
                name, flat, about = f"{self._name}.{position}", bucket.flat, bucket.described
                pending.append(
                    start.start_allreduce(
                        *(flat, flat, name, self._op, self._scales, self._process_set),
                        described=about,
                    )
                )
        Several(pending).result()
        session.current().step_done()  # the launcher counts exchanges of gradients as steps
        results = list(tensors)
        for bucket in buckets:
            for number, view in bucket.views:
                results[number] = view
        return results

    def _buckets_for(self, shapes: _Shapes) -> list[_Bucket]:
        if self._incarnation != session.incarnation():
            self._plans.clear()
            self._incarnation = session.incarnation()
        if shapes not in self._plans:
            self._plans[shapes] = _plan(shapes)
        return self._plans[shapes]


def _plan(shapes: _Shapes) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    filling: dict[torch.dtype, _Bucket] = {}
    for number, (dtype, shape) in enumerate(shapes):
        bucket = filling.get(dtype)
        size = shape.numel() * dtype.itemsize
        if bucket is None or bucket.num_elements * dtype.itemsize + size > _BUCKET_BYTES:
            bucket = filling[dtype] = _Bucket(dtype)
            buckets.append(bucket)
        bucket.add(number, shape)
    for bucket in buckets:
        bucket.allocate()
    return buckets
