"""Messages between members and the coordinator, as typed values.

A request carries an id that its reply repeats, so that many requests can be in flight on one
connection. msgspec encodes messages with msgpack. Decoding checks every type and can only produce
these classes. The wire tag of a message is its class name.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from paceline.control.member import Member, Membership
from paceline.observe.telemetry.events import Event

COORDINATOR = "coordinator"  # the listener's name in the handshake


class FromMember(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages that a member sends."""


class Heartbeat(FromMember, frozen=True):
    pass


class Leave(FromMember, frozen=True, rename={"has_lost_peer": "is_bereft"}):
    """The member exits cleanly: the end of its connection is not a loss."""

    is_finished: bool = True  # its work is done; else a replacement may be started
    has_lost_peer: bool = False  # it fails because it lost a peer, not for a reason of its own


class Report(FromMember, frozen=True):
    event: Event


class Request(FromMember, frozen=True):
    """Base of the messages that the coordinator answers."""

    id: int


class Join(Request, frozen=True):
    member: Member
    timeout_s: float


class Ready(Request, frozen=True):
    """A newcomer has set itself up and asks to be admitted. Answered with Joined."""

    member: Member


class Look(Request, frozen=True):
    """A newcomer asks for the membership without joining it. Answered with Joined."""


class Attach(Request, frozen=True):
    """A member reconnects after its connection broke. Answered with Joined, or Evicted."""

    member: Member
    adopted: int  # the generation that it has entered
    known: int  # the newest generation that it has received


class Adopted(FromMember, frozen=True):
    """The member has entered this generation, and left all older ones."""

    generation: int


class Accuse(FromMember, frozen=True):
    """The member reports another member as unreachable."""

    rank: int
    why: str  # empty: it is reachable again


class InSync(FromMember, frozen=True):
    """A backup has caught up: from now on the primary waits for its acknowledgement before it
    replies."""

    partition: int
    generation: int


class PaceAnswer(FromMember, frozen=True):
    """Answer to PaceWanted: the worker does not pass this step before it receives PaceSettled."""

    number: int
    step: int
    problem: str = ""  # instead of a step: why the worker refuses the pace


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
    """The member reports portions of a work pool (control/coordinator/work_pools.py) as done and
    asks for another portion. Answered with Lent."""

    line: str  # the loader
    index: int  # the pass over its data
    portions: int  # in the pool
    done: tuple[int, ...] = ()
    before: tuple[tuple[int, int], ...] = ()  # ranges that an earlier job has done


class LookAtPool(Request, frozen=True):
    """The member asks for the progress of a work pool. Answered with PoolState."""

    line: str
    index: int


class AskClock(Request, frozen=True):
    """The member asks for the coordinator's time (control/client/requests.py). Answered with
    ClockIs."""


class SettlePortions(FromMember, frozen=True):
    """The member has done some portions of a work pool, and gives others back."""

    line: str
    index: int
    done: tuple[int, ...] = ()
    back: tuple[int, ...] = ()  # parts of them may have been done
    begun: tuple[tuple[int, int], ...] = ()  # others: portion, and how many of its parts are done


class FromCoordinator(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages that the coordinator sends."""


class Answer(FromCoordinator, frozen=True):
    """Base of the answers to requests; `id` is the request's."""

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
    missing: int  # portions that are not done, without this member's
    again: int  # portions that were leased a second time
    begun: int = 0  # parts of the portion that another member has done before it left


class PoolState(Answer, frozen=True):
    portions: int  # 0: no worker has begun the pass, or it ended long ago
    done: tuple[tuple[int, int], ...]  # ranges
    again: tuple[int, ...]  # portions that were leased a second time


class ClockIs(Answer, frozen=True):
    now_s: float  # the coordinator's monotonic clock
    clock_id: str  # equal ids are the same clock


class Missing(FromCoordinator, frozen=True):
    """These ranks have not joined yet."""

    ranks: tuple[int, ...]
    waited_s: float


class LossKind(enum.Enum):
    """Why a member was lost. Processes decide by the kind, never by the text beside it."""

    ENDED = "ended"  # its connection or process ended, for an unknown reason
    KILLED = "killed"  # a signal ended its process
    CRASHED = "crashed"  # its process ended with an error
    SILENT = "silent"  # no heartbeats: it is stopped, stuck or cut off, and may wake up
    UNREACHABLE = "unreachable"  # it is alive, but other members cannot reach it
    # It failed because it could not reach a unit peer that is not known as lost.
    LOST_PEER = "bereft"
    LEFT = "left"  # it left before its work was done, and exits by itself
    RETIRED = "retired"  # a peer of its unit was lost
    RELEASED = "released"  # a peer of its unit left; it exits by itself, like that peer

    @property
    def is_own(self) -> bool:
        """Whether the member itself is the reason, and not a peer of its unit."""
        return self not in (LossKind.RETIRED, LossKind.RELEASED)

    @property
    def is_consequence(self) -> bool:
        """Whether the process ends because of another process or a decision of the coordinator.
        Its exit code then says nothing about the script."""
        own = (LossKind.ENDED, LossKind.KILLED, LossKind.CRASHED, LossKind.LEFT)
        return self not in own

    @property
    def is_willing(self) -> bool:
        """Whether the process exits by itself: it may finish its output and is not killed."""
        return self in (LossKind.LEFT, LossKind.RELEASED)

    @property
    def is_cause(self) -> bool:
        """Whether the member was lost for a reason of its own and did not leave."""
        return self.is_own and not self.is_willing


class Loss(msgspec.Struct, frozen=True):
    """A member that is no longer in the job, and why."""

    rank: int
    number: int
    role: str
    where: str
    why: str
    kind: LossKind = LossKind.ENDED  # the default is for journals of versions without kinds


class Changed(FromCoordinator, frozen=True):
    """The next membership: in the journal, and never taken back."""

    membership: Membership
    lost: tuple[Loss, ...] = ()
    joined: tuple[int, ...] = ()  # ranks
    why: str = ""


class Over(FromCoordinator, frozen=True):
    """The job is over: too few workers are left, or a partition has no holder."""

    why: str


class PaceWanted(FromCoordinator, frozen=True):
    """An operator requests another pace. Workers answer with PaceAnswer."""

    number: int
    pace: str


class PaceSettled(FromCoordinator, frozen=True):
    """The pace changes after this step; a negative step: the pace does not change."""

    number: int
    pace: str
    step: int


class Presence(FromCoordinator, frozen=True):
    """The new state of a member: "lost", "left", "silent" (no heartbeat), "leaving" (its host goes
    away) or "back"."""

    rank: int
    state: str
    detail: str
    where: str = ""  # its host and pid
    kind: LossKind | None = None  # of a loss; None: it is present, or has exited cleanly

    @property
    def is_gone(self) -> bool:
        return self.state in ("lost", "left")

    @property
    def has_finished(self) -> bool:
        """Whether it exited cleanly, with its work done."""
        return self.state == "left" and self.kind is None

    @property
    def text(self) -> str:
        """The detail, preceded by host and pid of the process."""
        return f"{self.where}: {self.detail}" if self.where else self.detail


class Wanted(FromCoordinator, frozen=True):
    """The launcher shall start a process with this role and number."""

    role: str
    number: int


class Unwanted(FromCoordinator, frozen=True):
    """An operator removed this member: it leaves at its next boundary."""

    rank: int


class Remark(FromCoordinator, frozen=True):
    """A line of text for the operators."""

    text: str


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
