"""DistributedOptimizer of horovod.tensorflow: the one of Keras, with arguments in another order."""

from __future__ import annotations

from typing import Any

from paceline.horovod.compression import Compression
from paceline.horovod.keras import optimizer as of_keras
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    **more: Any,
) -> Any:
    """Return a Keras optimizer that reduces gradients over all ranks before it applies them.

    See `paceline.horovod.keras.DistributedOptimizer`.
    """
    del use_locking
    return of_keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        **more,
    )
