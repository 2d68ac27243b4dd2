"""Horovod's callbacks for Keras: broadcast, averaged metrics, learning rates.

    BroadcastGlobalVariablesCallback    all ranks start with the root's weights and optimizer state
    MetricAverageCallback               metrics of an epoch are means over all ranks
    LearningRateWarmupCallback          raises the rate over the first epochs
    LearningRateScheduleCallback        multiplies the rate by epoch

UNEVEN DATA. At the end of an epoch's steps the first two callbacks join: a rank with fewer batches
takes part in the steps of the other ranks with zeros. Then all get the weights of a rank that had
all batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.horovod import objects, session
from paceline.horovod.keras.exchange import KerasReduction
from paceline.horovod.keras.pace import fulfil_wish
from paceline.horovod.keras.variables import broadcast_model
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.operations import join
from paceline.keras.distributed import exchange_of
from paceline.runtime.console import say

keras: Any = require("keras")
Callback: Any = keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(Callback):  # type: ignore[misc]
    """Give every rank the root's weights and optimizer state when training begins."""

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None, *_: Any
    ) -> None:
        del device
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or ())
        self._paced: Any = None  # the callback of paceline.keras for this fit

    def on_train_begin(self, logs: Any = None) -> None:
        _require_host_calls(self.model)
        self._paced = fulfil_wish(self.model)
        if self._paced is not None:
            self._paced.on_train_begin(logs)
        if self.model.built and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        if self.model.built and self.model.variables:
            self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begin_steps(self.model)
        if self._paced is not None:
            self._paced.on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        if not self.broadcast_done:  # the model had no weights before
            self._broadcast()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._paced is not None:
            self._paced.on_test_begin(logs)
        end_steps(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._paced is not None:
            self._paced.on_epoch_end(epoch, logs)
        end_steps(self.model)

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        kept = [(v, keras.ops.convert_to_numpy(v)) for v in self._local]
        broadcast_model(self.model, self.model.optimizer, self.root_rank)
        for variable, value in kept:
            variable.assign(value)
        self.broadcast_done = True


class MetricAverageCallback(Callback):  # type: ignore[misc]
    """Average the metrics of an epoch over all ranks. Put it before callbacks that use them."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        del device
        super().__init__()
        self._process_set = process_set

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        _require_host_calls(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        begin_steps(self.model)

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        end_steps(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        end_steps(self.model)
        if logs is None:
            return
        mine = {name: float(value) for name, value in logs.items()}
        everyone = objects.allgather_object(mine, "MetricAverageCallback", self._process_set)
        for name in mine:
            found = [values[name] for values in everyone if name in values]
            logs[name] = sum(found) / len(found)


def begin_steps(model: Any) -> None:
    """Note that the steps of an epoch begin."""
    exchange = exchange_of(model.optimizer)
    if isinstance(exchange, KerasReduction):
        exchange.has_open_steps = True


def end_steps(model: Any) -> None:
    """Join at the end of an epoch's steps, once; ranks with fewer batches then get the weights."""
    exchange = exchange_of(model.optimizer)
    if not isinstance(exchange, KerasReduction) or not exchange.has_open_steps:
        return
    exchange.has_open_steps = False
    if exchange.process_set is not global_process_set:
        return  # only all ranks together can join
    # Reading it waits for the steps that XLA runs in the background.
    done = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    join()
    steps = objects.allgather_object(done, "fit.steps")
    if min(steps) < max(steps):
        broadcast_model(model, model.optimizer, steps.index(max(steps)))


def _require_host_calls(model: Any) -> None:
    """Refuse what would fail in the first step with a message of the compiler."""
    is_reduced = isinstance(exchange_of(model.optimizer), KerasReduction)
    if is_reduced and model.jit_compile is True and keras.config.backend() != "jax":
        raise UsageError(
            "DistributedOptimizer: the model was compiled with jit_compile=True, and a step"
            " compiled by XLA or torch.compile cannot call the host; use compile(...,"
            " jit_compile=False)"
        )


class LearningRateScheduleCallback(Callback):  # type: ignore[misc]
    """Set the rate to `initial_lr * multiplier(epoch)` from `start_epoch` until before `end_epoch`.

    A number as multiplier means `multiplier ** epoch`. `staircase`: once in an epoch; else after
    each batch, with fractions of epochs. With momentum correction the momentum of an optimizer
    counts at the new rate.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr is required: a number above 0")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            base = float(multiplier)
            self.multiplier = lambda epoch: base**epoch

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise UsageError(
                f"{type(self).__name__}: the number of steps per epoch is not known; pass"
                " steps_per_epoch=..."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer  # on JAX this gives it the state of the last step
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        if old == new:
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0:
            _scale_momentum(optimizer, new / old)


def _scale_momentum(optimizer: Any, factor: float) -> None:
    """Let past gradients count at a new learning rate.

    Horovod multiplies the momentum by the factor for one batch. That is the same, but a compiled
    step would not see it.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.built or not getattr(inner, "momentum", 0):
        return
    for name in ("momentums", "_momentums"):  # SGD; RMSprop
        for variable in getattr(inner, name, None) or ():
            variable.assign(variable * factor)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the rate from `initial_lr / size` to `initial_lr`, over the first epochs.

    `initial_lr` is the rate for all ranks together, usually the one of a single process times
    `hvd.size()`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch  # round numbers at the ends of epochs
            size = session.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        is_last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if is_last and self.verbose > 0 and session.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            say(f"epoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}")
