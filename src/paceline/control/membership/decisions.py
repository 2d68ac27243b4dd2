"""What the roster remembers and what it decides: plain values.

`State` is all that must survive the coordinator. It is small, so an entry of the journal holds it
whole: replaying a journal is taking the last entry, and the history of changes is all of them.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from paceline.control.member import Membership
from paceline.control.transport import messages as m


class Place(msgspec.Struct, frozen=True):
    """A rank that was given away, for a process that is not a member yet."""

    rank: int
    role: str
    number: int
    request: int = 0  # the id with which it was asked for
    is_open: bool = False  # of a unit: nobody has asked for it yet, but for one of its mates


class Wish(msgspec.Struct, frozen=True):
    """A person's wish for another pace (control/coordinator/pace_change.py)."""

    OPEN: ClassVar[int] = -1
    REFUSED: ClassVar[int] = -2

    number: int  # counts up
    pace: str
    request: int  # the id with which it was asked for
    step: int = OPEN  # behind which it begins

    @property
    def is_settled(self) -> bool:
        return self.step != self.OPEN


class State(msgspec.Struct, frozen=True):
    """The membership, and what was promised about it."""

    membership: Membership | None = None
    next_rank: int = 0
    workers: tuple[int, ...] = ()  # the numbers that the job wants to have
    servers: tuple[int, ...] = ()
    reserved: tuple[Place, ...] = ()
    vacant: tuple[m.Loss, ...] = ()  # lost workers whose place waits for a replacement
    is_finishing: bool = False  # a worker has done all its work: nobody is replaced any more
    over: str = ""
    handled: tuple[int, ...] = ()  # ids of the last wishes: what is asked again is not done twice
    wish: Wish | None = None  # the last one about the pace


class Announce(msgspec.Struct, frozen=True):
    """Everybody shall know the new membership."""

    changed: m.Changed


class End(msgspec.Struct, frozen=True):
    """The job cannot go on."""

    why: str


class Tell(msgspec.Struct, frozen=True):
    """Everybody but that member shall know how it is."""

    presence: m.Presence


class Wanted(m.FromCoordinator, frozen=True):
    """The launcher shall start a process for this place."""

    role: str
    number: int


class Unwanted(m.FromCoordinator, frozen=True):
    """This member is out by a person's wish: it goes at its next boundary."""

    rank: int


class Remark(m.FromCoordinator, frozen=True):
    """A sentence for people."""

    text: str


Decision: TypeAlias = Announce | End | Tell | Wanted | Unwanted | Remark
