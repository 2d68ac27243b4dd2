"""Elastic training of TensorFlow: TensorFlowState and TensorFlowKerasState, beside the neutral
parts of horovod/elastic.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.horovod import elastic
from paceline.horovod.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from paceline.horovod.elastic import ObjectState as ObjectState
from paceline.horovod.elastic import State as State
from paceline.horovod.host_errors import run_with_errors
from paceline.horovod.keras.elastic import KerasState
from paceline.horovod.tensorflow.variables import broadcast_variables

TensorFlowKerasState = KerasState


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function(state, ...)` survive changes of the workers: it is called again after each."""
    return elastic.run(run_with_errors(function))


class TensorFlowState(ObjectState):
    """Variables of a loop without Keras, and plain values as attributes."""

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        del session
        if variables is None:
            raise UsageError(
                "TensorFlowState: pass variables=[...]; TensorFlow 2 keeps no list of variables"
            )
        self.variables = list(variables)
        self._keep()
        super().__init__(**kwargs)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self.variables, root_rank=0)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        self._values = [np.array(variable) for variable in self.variables]
