"""FitCallback: what a distributed model needs at the start of fit() and at the end of an epoch.

The callback comes before the script's, so that these see what all workers agree on.

    on_train_begin   all workers have rank 0's weights and optimizer state
    end of steps     before validation, or at the end of the epoch: workers with fewer batches take
                     part in the remaining steps; then batch norm statistics are averaged
    on_epoch_end     metrics are averaged; if one worker stops, all do
"""

from __future__ import annotations

from typing import Any

from paceline.comm.object_collectives import all_gather_object
from paceline.frameworks.averages import group_for
from paceline.keras.exchange import Exchange
from paceline.keras.variables import (
    average_logs,
    average_statistics,
    broadcast,
    make_seeds_differ,
)
from paceline.runtime.job import current


class FitCallback:
    """Builds the callback; Keras' own class is only known when Keras is imported."""

    @staticmethod
    def make(keras: Any, exchange: Exchange) -> Any:
        """Return a new callback for one `fit`."""
        kind = type("PacelineCallback", (_Steps, keras.callbacks.Callback), {})
        return kind(exchange)


class _Steps:
    model: Any

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._has_ended = True  # this epoch's steps

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        exchange: Any = self._exchange
        if not exchange.has_begun:
            exchange.begin()
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        if current().world.size > 1 and not exchange.has_prepared:
            exchange.has_prepared = True
            broadcast(self.model)
            make_seeds_differ(self.model, current().world.rank)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._has_ended = False
        self._exchange.report_rate(float(self.model.optimizer.learning_rate))

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self._end_steps()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._end_steps()
        self.model.stop_training = average_logs(logs, bool(self.model.stop_training))

    def _end_steps(self) -> None:
        if self._has_ended or current().world.size == 1:
            return
        self._has_ended = True
        training = self._exchange.switcher.training
        if training.is_free:
            return
        joined = all_gather_object(group_for("keras"), self._exchange.join())
        if max(joined) and training.method is None and not self._exchange.is_served:
            # A compiled step rounds differently than one without a batch.
            broadcast(self.model, joined.index(min(joined)))
        average_statistics(self.model)
