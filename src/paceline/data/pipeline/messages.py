"""What askers and data workers say to each other.

An ORDER says which samples make a batch and from which seed their random numbers follow, so that
whoever carries it out makes the same. A REPLY has the batch taken apart (parcel.py): its structure
as plain data, its tensors in memory that the asker can read (a SLOT), or behind it as bytes. An
order also gives back slots whose tensors the asker no longer holds: no message of their own.

Frames are those of the parameter servers (ps/messages.py): a fixed size, and a rest if need be.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from paceline.ps.line import decode

ORDER, ORDER_REST = 0, 1
_REPLY, _REST, _PAYLOAD, _TAIL = range(4)
# What a reply may say instead of a batch.
RAISED = "raised"  # the dataset did
UNKNOWN = "unknown"  # no such loader there
DIFFERS = "differs"  # another loader there
ENDED = "ended"  # the stream has no such place any more


class Order(msgspec.Struct, array_like=True, frozen=True):
    """What to make."""

    seq: int
    loader: int  # the loaders of a script are counted
    facts: str  # what that loader is: it must be the same one
    epoch: int
    seed: int
    indices: Any = None  # as data/portable.py writes them
    stream: tuple[int, int, int] | None = None  # without indices: workers, rank, samples of a step
    place: int = 0  # in a stream
    released: tuple[int, ...] = ()  # slots that may be used again
    room: int = 0  # bytes that the asker is ready to receive; between hosts


class Slot(msgspec.Struct, array_like=True, frozen=True):
    """Where the tensors of a reply lie in the memory of who made them."""

    number: int
    segment: int
    offset: int


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """What was made, or why it could not be."""

    seq: int
    plain: Any = None
    num_bytes: int = 0  # of all tensors
    slot: Slot | None = None  # None: they follow
    problem: str = ""  # RAISED, UNKNOWN, DIFFERS or ENDED
    text: str = ""


_orders = msgspec.msgpack.Decoder(Order)
_replies = msgspec.msgpack.Decoder(Reply)


def read_order(frame: np.ndarray, rest: np.ndarray | None) -> Order:
    """Decode an order; BadFrame if it is none."""
    return decode(_orders, frame, rest)  # type: ignore[no-any-return]


def read_reply(frame: np.ndarray, rest: np.ndarray | None) -> Reply:
    """Decode a reply; BadFrame if it is none."""
    return decode(_replies, frame, rest)  # type: ignore[no-any-return]


def reply_tag(seq: int) -> int:
    """Under which the frame of a reply travels."""
    return seq << 2 | _REPLY


def rest_tag(seq: int) -> int:
    """The rest of a frame."""
    return seq << 2 | _REST


def payload_tag(seq: int) -> int:
    """The bytes of the tensors, as many as there was room for."""
    return seq << 2 | _PAYLOAD


def tail_tag(seq: int) -> int:
    """The bytes for which there was no room."""
    return seq << 2 | _TAIL
