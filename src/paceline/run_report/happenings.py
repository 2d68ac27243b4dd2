"""What happened in a run, as sentences: who was lost, who joined, which epoch ended."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.figures import duration, short_number
from paceline.run_report.words import seconds_of, usable
from paceline.telemetry.events import (
    CoordinatorBack,
    EpochEnded,
    Filled,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Moved,
    Note,
    Promoted,
    Resumed,
)
from paceline.telemetry.record import Recorded

# Kinds and what people call them, in the order of their rows in the picture.
KINDS = {
    "lost": "lost",
    "joined": "joined",
    "resumed": "went on",
    "servers": "servers",
    "epoch": "epoch",
    "note": "note",
}


@dataclass(frozen=True)
class Happened:
    """One thing that happened. `text` is foreign in parts: not escaped yet."""

    t: float
    kind: str  # a key of KINDS
    text: str


def happened(t: float, event: Recorded) -> Happened | None:
    """Say what an event tells; None where it is nothing that people ask about."""
    match event:
        case MemberLost():
            text = f"{_who(event)} was lost: {event.why}"
            return Happened(t, "lost", text)
        case MemberJoined():
            return Happened(t, "joined", f"{_who(event)} joined")
        case MemberLeft():
            return Happened(t, "note", f"{_who(event)} left")
        case Resumed():
            return Happened(t, "resumed", _resumed(event))
        case EpochEnded():
            return Happened(t, "epoch", _epoch(event))
        case Promoted() | Moved() | Filled():
            return Happened(t, "servers", _servers(event))
        case CoordinatorBack():
            return Happened(t, "servers", "the coordinator was restarted and goes on")
        case Note():
            who = f"rank {event.rank}"
            text = event.text if event.text.startswith(who) else f"{who}: {event.text}"
            return Happened(t, "note", text)
        case _:
            return None


def _who(event: MemberLost | MemberJoined | MemberLeft) -> str:
    return f"{event.role} {event.number} (rank {event.rank}, {event.where})"


def _resumed(event: Resumed) -> str:
    workers = "1 worker goes" if event.num_workers == 1 else f"{event.num_workers} workers go"
    text = f"{workers} on with step {event.step} after {duration(seconds_of(event.took_s))}"
    if event.lost:
        ranks = ", ".join(str(rank) for rank in event.lost[:8])
        text += f", without rank {ranks}{', ...' if len(event.lost) > 8 else ''}"
    return text + ("; its exchange was done again" if event.repeats else "")


def _epoch(event: EpochEnded) -> str:
    whose = "" if event.worker is None else f" of worker {event.worker}"
    text = f"epoch {event.epoch} of {event.loader} ended{whose}: {_count(event.samples)} samples"
    counts = {
        "handed out again": event.reissued,
        "padded": event.padded,
        "dropped": event.dropped,
        "repeated": event.repeated,
    }
    return text + "".join(f", {_count(n)} {what}" for what, n in counts.items() if n)


def _count(value: int) -> str:
    drawable = usable(value)
    return "very many" if drawable is None else short_number(drawable)


def _servers(event: Promoted | Moved | Filled) -> str:
    parts = ", ".join(str(one) for one in event.partitions[:8])
    parts += ", ..." if len(event.partitions) > 8 else ""
    if isinstance(event, Promoted):
        return f"server {event.server} took over as primary of partitions {parts}"
    if isinstance(event, Moved):
        return f"partitions {parts} moved from server {event.source} to server {event.target}"
    return f"server {event.server} holds full copies of partitions {parts}"
