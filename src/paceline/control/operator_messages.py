"""Messages between operators (the launcher, commands such as `paceline scale`) and the coordinator.

The wire tag of a message is its class name. control/client/operator.py is the operator's side,
control/coordinator/operator_service.py the coordinator's.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.control import messages as m
from paceline.control.member import Membership
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import Reservation
from paceline.observe.telemetry.events import Event, MembershipEvent, ServerLoad
from paceline.observe.telemetry.staleness import TableReport

ROLE = "operator"  # in the handshake
HOST_ACTIONS = ("list", "add", "remove")


class FromOperator(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages that an operator sends."""


class Ask(FromOperator, frozen=True):
    """Base of the messages that the coordinator answers."""

    id: int


class Watch(Ask, frozen=True):
    """Send me all notifications from now on; answered with Status."""

    is_launcher: bool = False  # it sees the processes, and its reports about them count


class Reserve(Ask, frozen=True):
    """Reserve a rank and a number for a process that will join. Answered with Placed."""

    role: str
    number: int | None = None


class Scale(Ask, frozen=True):
    workers: int


class AddServers(Ask, frozen=True):
    count: int


class RemoveServers(Ask, frozen=True):
    numbers: tuple[int, ...]


class PlanLeave(Ask, frozen=True):
    """Let members leave because their host goes away; replacements are wanted at once."""

    ranks: tuple[int, ...]
    waits: bool = False  # workers work until their replacements are ready
    is_withdrawn: bool = False  # those that have not left yet stay
    why: str = ""


class SetPace(Ask, frozen=True):
    """Change the pace of all workers. Answered with the step after which it changes."""

    pace: str


class ChangeHosts(Ask, frozen=True):
    """Add a host to the job, remove one, or list all. The launcher answers with a text."""

    action: str  # one of HOST_ACTIONS
    host: str = ""  # "add": as in --hosts, "bob@c:4"; "remove": its name


class AskStatus(Ask, frozen=True):
    pass


class HostsChanged(FromOperator, frozen=True):
    """The launcher's answer to HostsWanted."""

    request: int
    text: str  # for people
    error: str = ""  # name of a class in paceline.errors


class Ended(FromOperator, frozen=True):
    """A process of the launcher has ended."""

    rank: int
    text: str
    kind: m.LossKind | None  # None: it exited cleanly


class Seen(FromOperator, frozen=True):
    """The launcher sees a process running, or stopped for this long."""

    rank: int
    stopped_for_s: float | None = None


class Placed(m.Answer, frozen=True):
    place: Reservation


class Status(m.Answer, frozen=True):
    """The job as the coordinator sees it."""

    policy: Policy
    membership: Membership | None
    missing: tuple[int, ...] = ()  # initial members that have not joined
    wanted: tuple[m.Wanted, ...] = ()
    reserved: tuple[Reservation, ...] = ()
    states: dict[int, str] = {}  # by rank: "silent: ..." and the like; members that are fine: none
    not_adopted: tuple[int, ...] = ()  # ranks that have not entered this generation yet
    reports: tuple[TableReport, ...] = ()  # the last report of each server about each table
    loads: tuple[ServerLoad, ...] = ()  # the last report of each server about its load
    is_finishing: bool = False
    over: str = ""
    num_workers: int = 0  # that the job is to have: those present and those wanted
    num_servers: int = 0  # the same
    leaving: tuple[int, ...] = ()  # ranks of members whose host goes away

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


class HostsWanted(m.FromCoordinator, frozen=True):
    """An operator's ChangeHosts, for the launcher; it answers with HostsChanged."""

    request: int
    action: str
    host: str = ""


class Happened(m.FromCoordinator, frozen=True):
    """An event for people: a member's report, or a change of the membership."""

    event: Event | MembershipEvent


OperatorMessage: TypeAlias = (
    m.Heartbeat
    | m.Leave
    | Watch
    | Reserve
    | Scale
    | AddServers
    | RemoveServers
    | PlanLeave
    | SetPace
    | ChangeHosts
    | HostsChanged
    | AskStatus
    | Ended
    | Seen
)
Notification: TypeAlias = (
    m.Changed | m.Over | m.Presence | Happened | m.Wanted | m.Unwanted | m.Remark | HostsWanted
)
ToOperator: TypeAlias = Notification | m.Reply | m.Failure | Placed | Status
