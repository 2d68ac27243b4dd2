"""What servers say to each other about the copies of a partition, as typed values.

The words are those of chain.py; here they have the form in which they travel. Tensors follow a
message where the other server cannot see the worker's memory, and with parts of a state.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np

from paceline.ps import messages as m
from paceline.ps.connection import decode
from paceline.ps.replication import chain as r
from paceline.ps.replication.snapshot_format import Part, Shapes


class Asked(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A worker's request."""

    request: m.AnyRequest
    error: str = ""  # it was refused before it was handled: a class in paceline.errors
    text: str = ""
    how: Literal["named", "sent", "late"] = "named"  # its tensors; see wire.py
    late: tuple[int, ...] = ()  # with a commit: shards whose pushes follow, as they are by now


class Entered(msgspec.Struct, frozen=True, tag=True):
    """A worker is in the job."""

    rank: m.Rank
    worker: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A worker is not in the job any more; `vacates`: its place waits for another one."""

    rank: m.Rank
    vacates: bool = False


class Closed(msgspec.Struct, frozen=True, tag=True):
    """A place that was vacant will not be taken."""

    worker: int


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """The order of the copies is another behind this."""


Event: TypeAlias = Entered | Gone | Closed
Op: TypeAlias = Asked | Entered | Gone | Closed | HandedOver


class PeerMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of what a server says to another one."""

    partition: int
    generation: int


class Said(PeerMessage, frozen=True):
    """A word of replication that travels as it is."""

    word: r.Begin | r.Standing | r.Ack | r.FillEnd


class Forward(PeerMessage, frozen=True):
    index: int
    rank: int
    seq: int
    op: Op
    again: bool = False
    shapes: Shapes = ()  # of the tensors that follow


class FillStart(PeerMessage, frozen=True):
    index: int
    clients: dict[int, tuple[int, list[tuple[int, m.Reply]]]]


class FillPart(PeerMessage, frozen=True):
    part: Part


class Sees(PeerMessage, frozen=True):
    """This server sees the memory of these workers, and of no others."""

    ranks: tuple[m.Rank, ...]


AnyMessage: TypeAlias = Sees | Said | Forward | FillStart | FillPart
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def read(frame: np.ndarray, rest: np.ndarray | None) -> AnyMessage:
    """Decode a message; BadFrame if it is none."""
    return decode(_decoder, frame, rest)  # type: ignore[no-any-return]
