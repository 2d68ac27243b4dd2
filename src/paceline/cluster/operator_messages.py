"""What operators and the coordinator say to each other: the launcher, and commands of people."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.cluster import messages as m
from paceline.cluster.decisions import Place, Remark, Unwanted, Wanted
from paceline.cluster.member import Membership
from paceline.cluster.policy import Policy
from paceline.telemetry.events import Event, Happening, ServerLoad
from paceline.telemetry.staleness import TableReport

ROLE = "operator"  # in the handshake


class FromOperator(msgspec.Struct, frozen=True, tag=True):
    """Base of what an operator says."""


class Ask(FromOperator, frozen=True):
    """Base of what is answered."""

    id: int


class Watch(Ask, frozen=True):
    """Tell me from now on what happens; answered with Status."""

    is_launcher: bool = False  # it sees the processes, and its word about them counts


class Reserve(Ask, frozen=True):
    """A process will come: give it a rank and a number. Answered with Placed."""

    role: str
    number: int | None = None


class Scale(Ask, frozen=True):
    workers: int


class AddServers(Ask, frozen=True):
    count: int


class RemoveServers(Ask, frozen=True):
    numbers: tuple[int, ...]


class SetPace(Ask, frozen=True):
    """Change the pace of all workers. Answered with the step behind which they do."""

    pace: str


class AskStatus(Ask, frozen=True):
    pass


class Ended(FromOperator, frozen=True):
    """A process of the launcher has ended."""

    rank: int
    text: str
    kind: m.LossKind | None  # how it is lost; None: it ended in good order


class Seen(FromOperator, frozen=True):
    """The launcher sees a process run, or stopped for so long."""

    rank: int
    stopped_for_s: float | None = None


class Placed(m.Answer, frozen=True):
    place: Place


class Status(m.Answer, frozen=True):
    """The job as the coordinator sees it."""

    policy: Policy
    membership: Membership | None
    missing: tuple[int, ...] = ()  # of the first crowd
    wanted: tuple[Wanted, ...] = ()
    reserved: tuple[Place, ...] = ()
    states: dict[int, str] = {}  # by rank: "silent: ..." and the like, if there is something to say
    not_adopted: tuple[int, ...] = ()  # ranks that do not work in this generation yet
    reports: tuple[TableReport, ...] = ()  # the last word of each server about each table
    loads: tuple[ServerLoad, ...] = ()  # the same about what it has to do
    is_finishing: bool = False
    over: str = ""

    @property
    def generation(self) -> int:
        return 0 if self.membership is None else self.membership.generation

    @property
    def degraded(self) -> tuple[int, ...]:
        """The partitions that have fewer copies than they should."""
        if self.membership is None:
            return ()
        held = self.membership.partitions
        return tuple(p for p, ranks in enumerate(held) if len(ranks) < self.policy.replicas)


class Happened(m.FromCoordinator, frozen=True):
    """Something for people: what a member reported, or what became of one."""

    event: Event | Happening


OperatorMessage: TypeAlias = (
    m.Heartbeat
    | m.Leave
    | Watch
    | Reserve
    | Scale
    | AddServers
    | RemoveServers
    | SetPace
    | AskStatus
    | Ended
    | Seen
)
News: TypeAlias = m.Changed | m.Over | m.Presence | Happened | Wanted | Unwanted | Remark
ToOperator: TypeAlias = News | m.Reply | m.Failure | Placed | Status
