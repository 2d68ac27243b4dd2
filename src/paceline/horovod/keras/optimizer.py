"""DistributedOptimizer for Keras: the optimizer's gradients are reduced over all ranks.

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    model.compile(optimizer, "mse")
    optimizer = hvd.DistributedOptimizer(optimizer, pace="ssp:3")     any pace of paceline.keras

The optimizer stays the same object. Its class is swapped for one of the same name, so a saved model
loads where there is no Paceline.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.horovod import session
from paceline.horovod.compression import Compression
from paceline.horovod.keras.exchange import KerasReduction
from paceline.horovod.keras.pace import wish_pace
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, check_gradient_op
from paceline.keras.distributed import exchange_of, swap_class

_numbers = itertools.count()  # of optimizers; the same on all ranks


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    pace: str | None = None,
    **options: Any,
) -> Any:
    """Return the optimizer, which reduces gradients over all ranks before it applies them.

    Call it before `compile`, and with fit() use BroadcastGlobalVariablesCallback. `pace` and
    `options` are those of `paceline.keras.distribute`. Gradients travel in buckets: `num_groups`,
    `groups` and the devices have no effect.
    """
    del device_dense, device_sparse, num_groups, groups, scale_local_gradients
    keras = require("keras")
    session.current()
    _check_optimizer(keras, optimizer)
    check_gradient_op(op, gradient_predivide_factor)
    if options and pace is None:
        raise UsageError(
            f"DistributedOptimizer: {', '.join(options)} needs pace=..., for example 'allreduce'"
        )
    if pace is not None:
        if op != Average or backward_passes_per_step != 1:
            raise UsageError(
                f"pace={pace!r} averages, and exchanges after each batch; op and"
                " backward_passes_per_step cannot be combined with it"
            )
        return wish_pace(optimizer, pace, options)
    scale = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    exchange = KerasReduction(
        optimizer,
        name or f"Distributed{type(optimizer).__name__}.{next(_numbers)}",
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        process_set,
        scale,
    )
    swap_class(keras, optimizer, exchange)
    _watch_loss_scaling()
    return optimizer


def _check_optimizer(keras: Any, optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        what = repr(optimizer) if isinstance(optimizer, str) else f"a {type(optimizer).__name__}"
        raise UsageError(
            f"DistributedOptimizer: expected an optimizer of Keras 3, got {what}; pass for example"
            " keras.optimizers.Adam(0.001). Optimizers of TensorFlow 1 are not supported: use"
            " DistributedGradientTape"
        )
    if exchange_of(optimizer) is not None:
        raise UsageError(
            "DistributedOptimizer: this optimizer is distributed already: by another"
            " DistributedOptimizer, or by paceline.keras.distribute after compile(); do one of the"
            " two"
        )


def _accumulate(optimizer: Any, passes: int, averages: bool) -> float:
    """Let Keras accumulate gradients; return the factor that makes its means what is asked for."""
    if passes < 1:
        raise UsageError(f"backward_passes_per_step={passes}: expected at least 1")
    if passes == 1:
        return 1.0
    if optimizer.built or getattr(optimizer, "inner_optimizer", None) is not None:
        raise UsageError(
            "backward_passes_per_step: pass a new optimizer, without a LossScaleOptimizer around"
            " it; compile() adds that"
        )
    optimizer.gradient_accumulation_steps = passes
    return 1.0 if averages else float(passes)


@functools.cache
def _watch_loss_scaling() -> None:
    """Let a LossScaleOptimizer that is put around a distributed optimizer do the exchange.

    compile() adds one for mixed_float16. It updates only if this rank's gradients are finite. An
    exchange inside would be left out on one rank and not on another.
    """
    outer = require("keras").optimizers.LossScaleOptimizer
    plain = outer.__init__

    @functools.wraps(plain)
    def init(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, inner_optimizer, *args, **kwargs)
        exchange: Any = exchange_of(inner_optimizer)
        if isinstance(exchange, KerasReduction):
            inner_optimizer.__class__ = type(inner_optimizer).__mro__[1]
            exchange.move_to(self)
            swap_class(require("keras"), self, exchange)

    outer.__init__ = init


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Return a saved model whose optimizer, with its state, is a DistributedOptimizer."""
    keras = require("keras")
    known = {one.__name__: one for one in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known or None)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
