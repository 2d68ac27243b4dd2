"""The line at the end of an epoch: how many samples there were, and how often each of them counted.

    paceline: epoch 3: 60,000 samples, each once; 64 re-issued

Said by the first worker, for every pass of a loader for training (pad=True) that came to its end,
and told as an event to whoever watches the job; on a mesh, by one of those that get the same
batches. The numbers are what was handed out (Tally in cursor.py). In lockstep a worker knows the
batches of all; where everybody runs free, and workers come and go, only its own. Epochs that are
short, or many, are said while they are new or differ from the one before; what was left out is
summed up when the process ends. A process alone says nothing unless something came twice.
"""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass, field

from paceline.data.agreement import group_of
from paceline.data.cursor.cursor import Cursor
from paceline.data.cursor.passes import Pass
from paceline.observe.telemetry.events import EpochEnded
from paceline.runtime import console

_FEW, _MANY = 3, 20  # epochs that are said of short ones, and of all
_SHORT_S = 1.0


@dataclass
class _Said:
    """What has been said about the epochs of one loader."""

    lines: int = 0
    last: str = ""
    unsaid: list[EpochEnded] = field(default_factory=list)


def tell_epoch(this: Pass, cursor: Cursor, name: str, began_s: float) -> None:
    """Say what there is to say about a pass that has come to its end."""
    job = this.job
    if not job.counts_batches:
        return
    is_first = group_of(job).rank == 0
    if not cursor.counts or not cursor.tally.samples or not (is_first or this.is_free):
        return
    event = _counted(this, cursor, name)
    job.rendezvous.agent.report(event)
    if not is_first or (job.env.source == "alone" and not _is_twice(event)):
        return
    text = in_words(event)
    said = this.ledger.said.setdefault(name, _Said())
    is_news = text != said.last and (said.lines < _MANY or _is_twice(event))
    limit = _FEW if time.monotonic() - began_s < _SHORT_S else _MANY
    said.last = text
    if is_news or said.lines < limit:
        said.lines += 1
        console.say(f"epoch {event.epoch}{_which(this, name)}: {text}")
    else:
        if not said.unsaid:
            atexit.register(_sum_up, said.unsaid)
        said.unsaid.append(event)


def in_words(event: EpochEnded) -> str:
    """Say the numbers of an epoch."""
    what = "draws of the sampler" if event.is_drawn else "samples"
    if event.worker is not None:
        words = [f"{event.samples:,} {what} of worker {event.worker}'s part, each at least once"]
    elif event.repeated:
        often = f"each at least once, at most {event.repeated:,} again"
        words = [f"{event.samples:,} {what}, {often}"]
    else:
        words = [f"{event.samples:,} {what}, each once"]
    if event.reissued:
        words.append(f"{event.reissued:,} re-issued")
    if event.padded:
        words.append(f"{event.padded:,} padded with weight 0")
    if event.dropped:
        words.append(f"{event.dropped:,} dropped (drop_last)")
    return "; ".join(words)


def _counted(this: Pass, cursor: Cursor, name: str) -> EpochEnded:
    tally = cursor.tally
    return EpochEnded(
        rank=this.job.env.rank,
        loader=name,
        epoch=cursor.epoch,
        samples=tally.samples - cursor.reissued,
        reissued=cursor.reissued,
        padded=tally.padded,
        dropped=cursor.dropped(tally.samples),
        repeated=tally.repeated,
        is_drawn=cursor.order is not None,
        worker=this.job.env.number if this.is_free else None,
    )


def _is_twice(event: EpochEnded) -> bool:
    return event.reissued > 0 or event.repeated > 0


def _which(this: Pass, name: str) -> str:
    """Name the loader where there are several for training."""
    return f" ({name})" if len(this.ledger.said) > 1 else ""


def _sum_up(unsaid: list[EpochEnded]) -> None:
    first, last = unsaid[0], unsaid[-1]
    samples = sum(event.samples for event in unsaid)
    epochs = f"epochs {first.epoch} to {last.epoch}" if len(unsaid) > 1 else f"epoch {first.epoch}"
    console.say(f"{epochs}: {len(unsaid)} more, {samples:,} samples in all")
