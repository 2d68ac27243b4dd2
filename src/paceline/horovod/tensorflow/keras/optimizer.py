"""DistributedOptimizer of horovod.tensorflow.keras: its arguments have another order again."""

from __future__ import annotations

from typing import Any

from paceline.horovod.tensorflow import optimizer as of_tensorflow


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    *args: Any,
    **more: Any,
) -> Any:
    """Return a Keras optimizer that reduces gradients over all ranks before it applies them.

    The other arguments are those of `paceline.horovod.tensorflow.DistributedOptimizer`, from
    `compression` on.
    """
    return of_tensorflow.DistributedOptimizer(
        optimizer, name, False, device_dense, device_sparse, *args, **more
    )
