"""optimizer.step() where workers may be lost or come.

Buffers have been exchanged with the gradients (a repeatable point), so the step itself is this
worker's own. Behind it all may change the membership together: in the roll call they have agreed
whether a change is due. Through servers nobody calls the roll; there a small exchange of its own
asks.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.data_parallel.model_state.buffers import Buffers
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.update.step import Step, Update
from paceline.runtime.job import Job


class ElasticStep:
    """Runs the steps of one model."""

    def __init__(
        self,
        job: Job,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        buffers: Buffers,
        group: Group,
        *,
        is_served: bool,
        resize_lr: str,
    ) -> None:
        self._job = job
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._buffers = buffers
        self._resize_lr = resize_lr
        self._asks = is_served and job.elastic.is_lockstep
        self._flags = torch.zeros(2)
        self._group = group

    def run(self, update: Update, step: Step, count: Callable[[float], None]) -> Any:
        """Run the update; `count` counts the step, and the seconds of meeting behind it, unless it
        has been counted elsewhere."""
        job, result = self._job, None
        passed = self._reducer.take_result()
        if not passed.has_caught_up:  # else the state that was received has this step in it
            result = self._run_resized(update, step)
        job.contribution.commit()
        late: list[bool] = []  # this worker has gone along with what the others agreed on
        met_s = time.perf_counter()
        is_stop_agreed, is_change_agreed = passed.is_stop_agreed, passed.is_change_agreed
        if self._asks:
            stops, changes = job.elastic.point(self._meet, lambda: late.append(True))
            is_stop_agreed, is_change_agreed = stops > 0, changes > 0 and not late
        if not (passed.has_caught_up or late):  # else those who were further have counted it
            count(time.perf_counter() - met_s if self._asks else 0.0)
        job.stopping.hear(is_stop_agreed)
        job.elastic.boundary(agreed=is_change_agreed)
        return result

    def _run_resized(self, update: Update, step: Step) -> Any:
        """Run the update, with learning rates that follow the number of workers if so asked."""
        optimizer = self._optimizer()
        if self._resize_lr == "keep" or optimizer is None:
            return update.run(step)
        share = self._job.world.size / self._job.env.world_size
        factor = share if self._resize_lr == "linear" else math.sqrt(share)
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            return update.run(step)
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _meet(self) -> list[float]:
        """Agree on buffers, and on what follows; return the latter.

        One point for each step: a newcomer's first step is then the one that the others are in.
        """
        self._buffers.synchronise()
        self._flags[0] = float(self._job.elastic.is_stop_due)
        self._flags[1] = float(self._job.elastic.is_change_due)
        self._group.all_reduce(self._flags, "max")
        return self._flags.tolist()
