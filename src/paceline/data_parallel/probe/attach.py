"""Connect the probes that PACELINE_PROBE asks for to a distributed model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from paceline.data_parallel.probe.backward import watch_backward
from paceline.data_parallel.probe.losses import BackwardLoss
from paceline.data_parallel.probe.slow_worker import SlowWorker
from paceline.data_parallel.probe.step_record import StepRecord
from paceline.observe.telemetry.events import BACKWARD_LOSS
from paceline.runtime.job import Job
from paceline.runtime.probe_spec import ProbeSpec

_is_attached = False  # to a model of this process; the first one counts


def attach_probes(
    probe: ProbeSpec,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settle: Callable[[], None],
) -> None:
    """Watch this worker from now on; `settle` waits for parameters that have not arrived yet."""
    global _is_attached
    if _is_attached:
        return
    _is_attached = True
    if probe.losses:
        losses = BackwardLoss(job.reporter)
        watch_backward(losses.note)
        job.reporter.watch(BACKWARD_LOSS, losses.mean)
    if probe.record:
        record = StepRecord(job, model, optimizer, settle, Path(probe.record), probe.steps)
        watch_backward(record.note_loss)
    factor = probe.slow.get(job.env.rank, 1.0)
    if factor > 1.0:  # the last one: the loss is there before the pause
        watch_backward(SlowWorker(factor, job.reporter).pause)
