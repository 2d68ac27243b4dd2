"""How long the script waits for its loader, and how many samples it gets: told to the reporter.

Whatever is behind the iterator counts (a dataset, processes of a DataLoader, data workers), except
the time in which it waits for other workers: where all must agree before each batch, the one with
the slow loader must not look like everybody else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from paceline.data.sources.samples import samples_in
from paceline.observe.telemetry.trace import tracer
from paceline.runtime.batch_weight import Announcer
from paceline.runtime.job import Job


def timed(batches: Iterator[Any], job: Job, announcer: Announcer) -> Iterator[Any]:
    """Yield what the iterator of one pass yields, and tell what that took."""
    reporter = job.reporter
    if not (reporter.times_steps or tracer.is_planned):
        yield from batches
        return
    waiting, is_mine = reporter.waiting, job.counts_batches
    try:
        while True:
            start_s = time.perf_counter() - waiting.seconds
            traced_s = tracer.start()
            batch = next(batches, timed)
            if traced_s:
                tracer.add("input", traced_s)
            reporter.input_s += time.perf_counter() - waiting.seconds - start_s
            if batch is timed:
                return
            if torch.is_grad_enabled():  # else it is evaluated with
                reporter.headway.take_batch()
                if is_mine:
                    reporter.samples += _samples(batch, announcer)
            yield batch
            del batch  # who makes the next one may need its memory
    finally:
        if hasattr(batches, "close"):  # at once, as `yield from` does
            batches.close()


def _samples(batch: Any, announcer: Announcer) -> int:
    if announcer.weight == 0.0:  # it repeats what others have
        return 0
    return samples_in(batch) if announcer.samples is None else announcer.samples
