"""What a pass reports: how long the script waited for its loader, and a summary of the epoch.

INPUT TIME is the time that the script waits for the next batch, whatever makes the batches (a
dataset, processes of a DataLoader, data workers). Time spent waiting for other workers is excluded:
if all workers must agree before each batch, only the worker with the slow loader shows it.

The EPOCH SUMMARY says how many samples there were, and how often each counted:

    paceline: epoch 3: 60,000 samples, each once; 64 reassigned after a loss

The first worker prints it for every pass of a training loader (pad=True) that came to its end, and
reports it as an event; on a mesh, one of the workers that get the same batches does. The numbers
are what was handed out (Tally in cursor/cursor.py). In lockstep a worker knows the batches of all
workers; at a free-running elastic pace, only its own. Short epochs, and epochs after the first 20,
are printed only if they differ from the one before; the rest are summed up when the process ends. A
single process prints a summary only if a sample was used twice.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.data.cursor.cursor import Cursor
from paceline.data.data_pass import DataPass, group_of
from paceline.data.sources.samples import samples_in
from paceline.observe.telemetry.events import EpochEnded
from paceline.observe.telemetry.trace import tracer
from paceline.runtime import console
from paceline.runtime.batch_weight import Announcer
from paceline.runtime.job import Job

_FEW, _MANY = 3, 20  # epochs that are printed: of short ones, and of all
_SHORT_S = 1.0


def timed(batches: Iterator[Any], job: Job, announcer: Announcer) -> Iterator[Any]:
    """Yield the batches of one pass, and report the input time and the samples."""
    reporter = job.reporter
    if not (reporter.times_steps or tracer.is_planned):
        yield from batches
        return
    waiting, counts_samples = reporter.waiting, job.is_first_of_batch
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
            if torch.is_grad_enabled():  # else this is an evaluation
                reporter.loop_progress.take_batch()
                if counts_samples:
                    reporter.samples += _samples(batch, announcer)
            yield batch
            del batch  # making the next one may need its memory
    finally:
        if hasattr(batches, "close"):  # at once, as `yield from` does
            batches.close()


def _samples(batch: Any, announcer: Announcer) -> int:
    if announcer.weight == 0.0:  # it repeats a batch of another worker
        return 0
    return samples_in(batch) if announcer.samples is None else announcer.samples


@dataclass
class _Printed:
    """What was printed about the epochs of one loader."""

    lines: int = 0
    last: str = ""
    skipped: list[EpochEnded] = field(default_factory=list)


def report_epoch(data_pass: DataPass, cursor: Cursor, name: str, began_s: float) -> None:
    """Report a pass that has come to its end."""
    job = data_pass.job
    if not job.is_first_of_batch:
        return
    is_first = group_of(job).rank == 0
    if not cursor.counts or not cursor.tally.samples or not (is_first or data_pass.is_free_running):
        return
    event = _event_of(data_pass, cursor, name)
    job.rendezvous.agent.report(event)
    has_repeats = event.reissued > 0 or event.repeated > 0
    if not is_first or (job.env.source == "alone" and not has_repeats):
        return
    text = format_epoch(event)
    reported = data_pass.progress.reported
    printed = reported.setdefault(name, _Printed())
    is_news = text != printed.last and (printed.lines < _MANY or has_repeats)
    limit = _FEW if time.monotonic() - began_s < _SHORT_S else _MANY
    printed.last = text
    if is_news or printed.lines < limit:
        printed.lines += 1
        loader = f" ({name})" if len(reported) > 1 else ""  # of several for training
        console.say(f"epoch {event.epoch}{loader}: {text}")
    else:
        if not printed.skipped:
            atexit.register(_sum_up, printed.skipped)
        printed.skipped.append(event)


def format_epoch(event: EpochEnded) -> str:
    """Return the numbers of an epoch as text."""
    what = "draws of the sampler" if event.is_drawn else "samples"
    if event.worker is not None:
        parts = [f"{event.samples:,} {what} of worker {event.worker}'s part, each at least once"]
    elif event.repeated:
        often = f"each at least once, at most {event.repeated:,} repeated"
        parts = [f"{event.samples:,} {what}, {often}"]
    else:
        parts = [f"{event.samples:,} {what}, each once"]
    if event.reissued:
        parts.append(f"{event.reissued:,} reassigned after a loss")
    if event.padded:
        parts.append(f"{event.padded:,} padded with weight 0")
    if event.dropped:
        parts.append(f"{event.dropped:,} dropped (drop_last)")
    return "; ".join(parts)


def _event_of(data_pass: DataPass, cursor: Cursor, name: str) -> EpochEnded:
    tally = cursor.tally
    return EpochEnded(
        rank=data_pass.job.env.rank,
        loader=name,
        epoch=cursor.epoch,
        samples=tally.samples - cursor.reassigned,
        reissued=cursor.reassigned,
        padded=tally.padded,
        dropped=cursor.dropped(tally.samples),
        repeated=tally.repeated,
        is_drawn=cursor.order is not None,
        worker=data_pass.job.env.number if data_pass.is_free_running else None,
    )


def _sum_up(skipped: list[EpochEnded]) -> None:
    first, last = skipped[0], skipped[-1]
    samples = sum(event.samples for event in skipped)
    epochs = f"epochs {first.epoch} to {last.epoch}" if len(skipped) > 1 else f"epoch {first.epoch}"
    console.say(f"{epochs}: {len(skipped)} more, {samples:,} samples in all")
