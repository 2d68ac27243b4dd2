"""The words of replication: what copies of a partition say to each other and ask of their owner.

replication.py says what follows from each; messages.py has the form in which they travel.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol, TypeAlias

import msgspec

from paceline.ps.replication.applied import Clients

HANDOVER = "handover"  # the op of the entry after which the order is another


class Role(Enum):
    """What the membership makes of a server for a partition."""

    NONE = "none"
    PRIMARY = "primary"
    BACKUP = "backup"
    FILLING = "filling"
    LOST = "lost"  # it has to be the first, and does not have everything: nobody has


class Entry(msgspec.Struct, frozen=True):
    """One operation, at its place in the order of all."""

    index: int
    rank: int  # whose
    seq: int  # its number there; 0: an event, which is not asked and not answered
    op: Any  # the owner's
    again: bool = False  # it was applied before: only the answer is wanted, made anew


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Upstream: I pass entries on to you from now on, and am that far."""

    generation: int
    index: int


class Standing(msgspec.Struct, frozen=True, tag=True):
    """Downstream, to Begin: I am that far; EMPTY: I have nothing."""

    generation: int
    index: int


class Forward(msgspec.Struct, frozen=True):
    generation: int
    entry: Entry


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Downstream: this copy and all behind it have applied everything up to the index."""

    generation: int
    index: int


class FillStart(msgspec.Struct, frozen=True):
    """Upstream: forget what you have; state as of the index follows, then entries behind it."""

    generation: int
    index: int
    clients: Clients


class FillPart(msgspec.Struct, frozen=True):
    """Upstream: a part of the state, as it is after all entries that came before this."""

    generation: int
    content: Any  # the owner's


class FillEnd(msgspec.Struct, frozen=True, tag=True):
    """Upstream: you have everything, and I wait for you with every answer."""

    generation: int


Message: TypeAlias = Begin | Standing | Forward | Ack | FillStart | FillPart | FillEnd


class Owner(Protocol):
    """What a copy asks of whoever runs it."""

    def send(self, peer: int, message: Message) -> None:
        """Send to another server, in order; lost if the line to it is broken."""

    def apply(self, entry: Entry) -> None:
        """Do it, the same on every copy; calls `answer`, for this request or parked ones."""

    def deliver(self, rank: int, seq: int, answer: Any, extra: Any) -> None:
        """Let an answer go to a client, if there is a line to it."""

    def fill(self, peer: int) -> None:
        """Begin to send the state, with `send_part`; call `filled` when all of it was sent."""

    def restore(self, content: Any) -> None:
        """Take a part of the state, which the upstream's owner has sent."""

    def in_sync(self, generation: int) -> None:
        """Tell the coordinator that this copy has everything since that generation."""
