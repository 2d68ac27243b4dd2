"""Callbacks for Keras. `paceline.keras.distribute` adds what a model needs by itself; these are for
scripts with an optimizer or a loop of their own. Importing this imports Keras."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError
from paceline.frameworks.requirement import require
from paceline.keras.variables import average_logs, broadcast
from paceline.runtime.job import rank, world_size

keras = require("keras")


class BroadcastVariables(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Give every worker the weights and optimizer state of one, when training begins."""

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self._root = root

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        broadcast(self.model, self._root)


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Average the metrics of each epoch over all workers. Put it before callbacks that use them."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        average_logs(logs)


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Raise the learning rate from `initial_rate` to its multiple by the number of workers.

    The rate grows after each batch, over the first `epochs` epochs; it then stays at
    `initial_rate * pl.world_size()`, unless `factor` is another one.
    """

    def __init__(self, initial_rate: float, epochs: int = 5, factor: float | None = None) -> None:
        super().__init__()
        if not initial_rate > 0 or epochs < 1:
            raise UsageError(
                f"LearningRateWarmup({initial_rate}, epochs={epochs}): expected a rate above 0 and"
                " at least one epoch"
            )
        self._initial, self._epochs, self._factor = initial_rate, epochs, factor
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._epoch = epoch
        self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        steps = (self.params or {}).get("steps")
        if steps and self._epoch < self._epochs:
            self._set(self._epoch + batch / steps)

    def _set(self, progress: float) -> None:
        factor = world_size() if self._factor is None else self._factor
        done = min(progress / self._epochs, 1.0)
        self.model.optimizer.learning_rate = self._initial * (1 + (factor - 1) * done)


class OnRankZero(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    """Run a callback on rank 0 only: `OnRankZero(keras.callbacks.ModelCheckpoint(path))`."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self._inner = callback if rank() == 0 else keras.callbacks.Callback()

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._inner.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._inner.set_model(model)


def _pass_on(name: str) -> Any:
    def hook(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **named)

    return hook


for _name in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(OnRankZero, _name, _pass_on(_name))
