"""The messages of chain replication, and what a copy of a partition asks of its owner. Pure.

replication.py has the rules; messages.py has the form in which the messages travel.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol, TypeAlias

import msgspec

from paceline.ps.replication.applied import Clients

HANDOVER = "handover"  # the op of the entry after which the new order is in effect


class Role(Enum):
    """A server's role for a partition, as the membership gives it."""

    NONE = "none"
    PRIMARY = "primary"
    BACKUP = "backup"
    FILLING = "filling"
    LOST = "lost"  # it has to be the primary, but no server has the complete state


class LogEntry(msgspec.Struct, frozen=True):
    """One operation of the replicated log."""

    index: int
    rank: int  # the client's
    seq: int  # the client's number of it; 0: an event, which has no answer
    op: Any  # defined by the owner
    again: bool = False  # it was applied before: only its answer is needed, made anew


class Begin(msgspec.Struct, frozen=True, tag=True):
    """From upstream: it forwards entries from now on, and has applied up to the index."""

    generation: int
    index: int


class Standing(msgspec.Struct, frozen=True, tag=True):
    """From downstream, in reply to Begin: it has applied up to the index; EMPTY: nothing."""

    generation: int
    index: int


class Forward(msgspec.Struct, frozen=True):
    generation: int
    entry: LogEntry


class Ack(msgspec.Struct, frozen=True, tag=True):
    """From downstream: this copy and all after it have applied everything up to the index."""

    generation: int
    index: int


class FillStart(msgspec.Struct, frozen=True):
    """From upstream: forget your state; a snapshot as of the index follows, then later entries."""

    generation: int
    index: int
    clients: Clients


class FillPart(msgspec.Struct, frozen=True):
    """From upstream: a part of the snapshot, as of all entries that were sent before it."""

    generation: int
    content: Any  # defined by the owner


class FillEnd(msgspec.Struct, frozen=True, tag=True):
    """From upstream: the snapshot is complete, and every answer waits for this copy."""

    generation: int


Message: TypeAlias = Begin | Standing | Forward | Ack | FillStart | FillPart | FillEnd


class ReplicaOwner(Protocol):
    """The process around a copy."""

    def send(self, peer: int, message: Message) -> None:
        """Send to another server, in order; lost if the connection to it is broken."""

    def apply(self, entry: LogEntry) -> None:
        """Apply an entry, the same on every copy; calls `answer`, also for parked requests."""

    def deliver(self, rank: int, seq: int, answer: Any, extra: Any) -> None:
        """Send an answer to a client, if it is connected."""

    def fill(self, peer: int) -> None:
        """Start sending the snapshot with `send_part`; call `filled` when all of it was sent."""

    def restore(self, content: Any) -> None:
        """Apply a part of the snapshot, which the upstream's owner has sent."""

    def in_sync(self, generation: int) -> None:
        """Report to the coordinator that this copy has everything since that generation."""
