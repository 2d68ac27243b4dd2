"""Elastic training of Keras models: KerasState, and the callbacks that commit it during fit()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.horovod import elastic
from paceline.horovod.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from paceline.horovod.elastic import ObjectState as ObjectState
from paceline.horovod.elastic import State as State
from paceline.horovod.host_errors import run_with_errors
from paceline.horovod.keras.variables import broadcast_model, model_variables
from paceline.keras.variables import assign, numpy_of

keras: Any = require("keras")


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function(state, ...)` survive changes of the workers: it is called again after each."""
    return elastic.run(run_with_errors(function))


class KerasState(ObjectState):
    """A Keras model with its optimizer, and plain values as attributes."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any):
        del backend
        if not model.built:
            raise UsageError("KerasState: build the model first: model.build(input_shape)")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise UsageError("KerasState: compile the model first, or pass optimizer=...")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._keep()
        super().__init__(**kwargs)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        assign(model_variables(self.model, self.optimizer), self._values)
        super().restore()

    def sync(self) -> None:
        broadcast_model(self.model, self.optimizer, 0)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        values = numpy_of(model_variables(self.model, self.optimizer))
        self._values = [value.copy() for value in values]


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit the state after every `batches_per_commit` batches, and after every epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._batches_per_commit = state, batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        # All workers commit at the same batches, also those that have just joined.
        self._left = self._batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._left -= 1
        if self._left == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._commit()

    def _commit(self) -> None:
        self._left = self._batches_per_commit
        _ = self.model  # on JAX this gives the model the values of the last step
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep `state.batch` at the last batch of this epoch that is done. Put it before the commit."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep `state.epoch` at the number of the epoch that comes next. Put it before the commit."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self._first = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._state.epoch = self._first + epoch + 1
