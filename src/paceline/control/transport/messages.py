"""What members and the coordinator say to each other, as typed values.

A request carries an id that its reply repeats, so that many can be under way on one connection.
Encoded with msgpack by msgspec: decoding checks every type and can only ever produce these
classes.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from paceline.control.member import Member, Membership
from paceline.observe.telemetry.events import Event

COORDINATOR = "coordinator"  # the listener's name in the handshake


class FromMember(msgspec.Struct, frozen=True, tag=True):
    """Base of what a member says."""


class Heartbeat(FromMember, frozen=True):
    pass


class Leave(FromMember, frozen=True):
    """The member ends in good order: closing the connection next is no loss."""

    is_finished: bool = True  # its work is done; else others may take its place
    is_bereft: bool = False  # it fails because it has lost a peer, not for a reason of its own


class Report(FromMember, frozen=True):
    event: Event


class Request(FromMember, frozen=True):
    """Base of what is answered with Reply, Joined or Failure."""

    id: int


class Join(Request, frozen=True):
    member: Member
    timeout_s: float


class Ready(Request, frozen=True):
    """A newcomer has done what it can do alone: let it in. Answered with Joined."""

    member: Member


class Look(Request, frozen=True):
    """A newcomer asks who is there, without being in. Answered with Joined."""


class Attach(Request, frozen=True):
    """A member is back after its connection broke. Answered with Joined, or Evicted."""

    member: Member
    adopted: int  # the generation in which it works
    known: int  # the newest generation that it has heard of


class Adopted(FromMember, frozen=True):
    """The member works in this generation; everything older is behind it."""

    generation: int


class Accuse(FromMember, frozen=True):
    """The member cannot reach another one, whatever that one tells the coordinator."""

    rank: int
    why: str  # empty: it can again


class InSync(FromMember, frozen=True):
    """A filling server has everything: no reply leaves the primary without its word any more."""

    partition: int
    generation: int


class PaceAnswer(FromMember, frozen=True):
    """Answers PaceWanted: the worker goes no further than this step before it is settled."""

    number: int
    step: int
    problem: str = ""  # why it cannot be, instead


class StoreSet(Request, frozen=True):
    key: str
    value: bytes


class StoreGet(Request, frozen=True):
    key: str
    timeout_s: float


class StoreAdd(Request, frozen=True):
    key: str
    amount: int


class StoreCompareSet(Request, frozen=True):
    key: str
    expected: bytes
    desired: bytes


class StoreWait(Request, frozen=True):
    keys: tuple[str, ...]
    timeout_s: float


class StoreCheck(Request, frozen=True):
    keys: tuple[str, ...]


class StoreDelete(Request, frozen=True):
    key: str


class StoreNumKeys(Request, frozen=True):
    pass


class TakePortion(Request, frozen=True):
    """The member has done some portions of a pool (control/coordinator/work_pools.py), and wants
    another one. Answered with Lent."""

    line: str
    index: int
    portions: int  # that there are
    done: tuple[int, ...] = ()
    before: tuple[tuple[int, int], ...] = ()  # ranges that an earlier job has done


class LookAtPool(Request, frozen=True):
    """The member asks how far a pool is. Answered with PoolState."""

    line: str
    index: int


class AskClock(Request, frozen=True):
    """The member asks for the time (control/client/clock_sync.py). Answered with ClockIs."""


class SettlePortions(FromMember, frozen=True):
    """The member has done these portions of a pool, and will not do those that it gives back."""

    line: str
    index: int
    done: tuple[int, ...] = ()
    back: tuple[int, ...] = ()


class FromCoordinator(msgspec.Struct, frozen=True, tag=True):
    """Base of what the coordinator says."""


class Answer(FromCoordinator, frozen=True):
    """Base of what answers a request: it repeats the request's id."""

    id: int


class Reply(Answer, frozen=True):
    value: bytes | int | bool | None = None


class Joined(Answer, frozen=True):
    membership: Membership


class Failure(Answer, frozen=True):
    error: str  # name of a class in paceline.errors
    text: str


class Lent(Answer, frozen=True):
    portion: int  # -1: there is none now
    missing: int  # portions that are not done, apart from this member's
    again: int  # portions that were lent a second time


class PoolState(Answer, frozen=True):
    portions: int  # 0: nobody has begun, or it is long over
    done: tuple[tuple[int, int], ...]  # ranges
    again: tuple[int, ...]  # portions that were lent a second time


class ClockIs(Answer, frozen=True):
    now_s: float  # the coordinator's monotonic clock
    clock_id: str  # which clock that is: equal names are equal clocks


class Missing(FromCoordinator, frozen=True):
    """The join still waits for these ranks."""

    ranks: tuple[int, ...]
    waited_s: float


class LossKind(enum.Enum):
    """How a member came to be lost: others decide by this, never by the words for people."""

    ENDED = "ended"  # its connection or process ended; nobody saw how
    KILLED = "killed"  # its process was ended by a signal
    CRASHED = "crashed"  # its process ended with an error
    SILENT = "silent"  # no sign of life: it is stopped, stuck or cut off, and may wake up
    UNREACHABLE = "unreachable"  # it is alive, but other members cannot reach it
    BEREFT = "bereft"  # it failed because it could not reach a mate, who is not seen to be lost
    LEFT = "left"  # it left before its work was done, and ends by itself
    RETIRED = "retired"  # a mate of its unit was lost
    RELEASED = "released"  # a mate of its unit left; it ends by itself, like that one

    @property
    def is_own(self) -> bool:
        """Whether the reason lies with the member itself, and not with a mate."""
        return self not in (LossKind.RETIRED, LossKind.RELEASED)

    @property
    def is_consequence(self) -> bool:
        """Whether the process ends because of others, or because the coordinator decided so: its
        exit code then says nothing about the script."""
        own = (LossKind.ENDED, LossKind.KILLED, LossKind.CRASHED, LossKind.LEFT)
        return self not in own

    @property
    def is_willing(self) -> bool:
        """Whether the process ends by itself: it may finish what it says, and is not stopped."""
        return self in (LossKind.LEFT, LossKind.RELEASED)

    @property
    def is_cause(self) -> bool:
        """Whether the member is lost for a reason of its own, and against its will."""
        return self.is_own and not self.is_willing


class Loss(msgspec.Struct, frozen=True):
    """A member that is not in the job any more, and why."""

    rank: int
    number: int
    role: str
    where: str
    why: str
    kind: LossKind = LossKind.ENDED  # the default: a journal of a version without kinds


class Changed(FromCoordinator, frozen=True):
    """The job has another membership from now on: journaled, and never taken back."""

    membership: Membership
    lost: tuple[Loss, ...] = ()
    joined: tuple[int, ...] = ()  # ranks
    why: str = ""


class Over(FromCoordinator, frozen=True):
    """The job cannot go on: too few workers are left, or a partition has no holder."""

    why: str


class PaceWanted(FromCoordinator, frozen=True):
    """A person wishes for another pace. Answered by workers, with PaceAnswer."""

    number: int
    pace: str


class PaceSettled(FromCoordinator, frozen=True):
    """Behind this step the pace is another one; a negative step: it stays as it is."""

    number: int
    pace: str
    step: int


class Presence(FromCoordinator, frozen=True):
    """A member's state changed: "lost", "left", "silent" (no heartbeat) or "back"."""

    rank: int
    state: str
    detail: str
    where: str = ""  # its host and pid
    kind: LossKind | None = None  # of a loss; None: it is there, or has ended in good order

    @property
    def is_gone(self) -> bool:
        return self.state in ("lost", "left")

    @property
    def has_finished(self) -> bool:
        """Whether it left in good order, and nobody misses it."""
        return self.state == "left" and self.kind is None

    @property
    def words(self) -> str:
        """The detail, with the place of the process."""
        return f"{self.where}: {self.detail}" if self.where else self.detail


MemberMessage: TypeAlias = (
    Heartbeat
    | Leave
    | Report
    | Join
    | Ready
    | Look
    | Attach
    | Adopted
    | Accuse
    | InSync
    | PaceAnswer
    | StoreSet
    | StoreGet
    | StoreAdd
    | StoreCompareSet
    | StoreWait
    | StoreCheck
    | StoreDelete
    | StoreNumKeys
    | TakePortion
    | LookAtPool
    | AskClock
    | SettlePortions
)
CoordinatorMessage: TypeAlias = (
    Reply
    | Joined
    | Failure
    | Lent
    | PoolState
    | ClockIs
    | Missing
    | Presence
    | Changed
    | Over
    | PaceWanted
    | PaceSettled
)
