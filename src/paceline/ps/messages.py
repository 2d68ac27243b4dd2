"""Messages between workers and servers, as typed values; connection.py has their frames.

A REQUEST carries a sequence number, which its REPLY repeats; (worker, sequence) names it, so that
one that is sent again is answered, not applied. Tensors do not travel in messages: on one host a
message says where they lie (`Where`), between hosts they follow as PAYLOAD, straight from and into
the memory where they belong.

Encoded with msgpack by msgspec: decoding checks every type and can only ever produce these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from paceline.ps.spec import Count, TableSpec

_MAX_SEQ = 1 << 43  # so that the tags of what belongs to a request fit

Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_SEQ)]


class Where(msgspec.Struct, frozen=True, array_like=True):
    """A place in the engine memory of a process of this host."""

    rank: Rank
    segment: Address
    offset: Address


class WorkerBuffer(msgspec.Struct, frozen=True, array_like=True):
    """One worker's memory for a shard; None: it is on another host, or does not want it."""

    params: Where | None = None  # fresh values are written there
    average: Where | None = None  # averaged gradients are written there


class SharedMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that all workers of the server's host share: the shard itself is in it."""

    params: Where
    average: Where


class Traced(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of what may belong to a step that is traced."""

    step: int = 0  # the worker's; 0: it is not traced


class Request(Traced, frozen=True, tag=True, omit_defaults=True):
    """Base of a worker's requests."""

    seq: Number


class Open(Request, frozen=True, rename={"buffers": "seats", "shared": "homes"}):
    """Create a table, or join one that exists; the reply has its number."""

    spec: TableSpec
    buffers: tuple[WorkerBuffer, ...] = ()  # by shard
    shared: tuple[SharedMemory, ...] = ()  # by shard; empty: the server uses memory of its own
    wants_average: bool = False
    wire: str = ""  # dtype of payloads between hosts; "" is the shard's own
    maps: bool = False  # on its host this worker sees the server's memory, if the reply names it


class Find(Request, frozen=True):
    """Ask for the table of that name."""

    name: str


class Assign(Request, frozen=True):
    """Set a shard's values; `params`: only of these."""

    table: int
    shard: int
    where: Where | None
    params: tuple[int, ...] = ()


class Push(Request, frozen=True):
    """Hand over a gradient; answered when its average is known, if the table averages."""

    table: int
    shard: int
    clock: int
    where: Where | None
    dtype: str
    absent: tuple[int, ...] = ()
    codec: str = ""  # it is a packet (packing.py) that this codec reads; "": numbers of that dtype
    num_bytes: Count = 0  # how long the packet is


class Replace(Request, frozen=True):
    """Use this instead of the average: the script has changed its gradients."""

    table: int
    shard: int
    where: Where | None
    absent: tuple[int, ...] = ()


class Commit(Request, frozen=True):
    """End a step: what was pushed counts. Answered with fresh values when this worker may read."""

    table: int
    clock: int
    settings: tuple[dict[str, Any], ...] | None = None  # of the param groups; None: as before
    reads: bool = True  # False: answered without values, when it was applied
    into: tuple[Where, ...] = ()  # by shard: where values go; empty: to the worker's seat
    counts: bool = True  # False: what was pushed here does not, since other servers refuse theirs
    stops: bool = False  # this worker was asked to stop


class Pull(Request, frozen=True):
    """Read the newest values: at once, or `in_turn`, when the clocks allow it."""

    table: int
    in_turn: bool = False
    into: tuple[Where, ...] = ()  # by shard: where values go; empty: to the worker's seat


class Peek(Request, frozen=True):
    """Read the newest values at once; any process may, and the clocks do not change."""

    table: int
    into: tuple[Where, ...] = ()  # by shard; empty: the values follow


class StandAside(Request, frozen=True):
    """Take no part in a table any more, and only watch it."""

    table: int


class Follow(Request, frozen=True):
    """Wait for a version above `after`; answered without one when none can come any more."""

    table: int
    after: int
    follower: int = 0  # a number that the worker has chosen


class Unfollow(Request, frozen=True):
    """Wait no longer: what that follower has asked is answered as it stands."""

    table: int
    follower: int


class Keys(Request, frozen=True):
    """Ask for the names of all arrays here."""


class FetchState(Request, frozen=True):
    """Read the optimizer's state of a shard."""

    table: int
    shard: int


class EncodedStateEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the optimizer's state: a plain value, or a tensor that follows."""

    piece: Count
    key: str
    value: float | int | bool | None = None
    dtype: str = ""
    shape: tuple[Count, ...] = ()


class LoadState(Request, frozen=True):
    """Replace the optimizer's state of a shard."""

    table: int
    shard: int
    entries: tuple[EncodedStateEntry, ...]


class Stats(Request, frozen=True):
    """Ask what the server has counted."""


class Leave(Request, frozen=True):
    """This worker will ask nothing more."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to any request; which fields count depends on it."""

    seq: int
    error: str = ""  # name of a class in paceline.errors
    text: str = ""
    notice: str = ""
    table: int = -1
    is_new: bool = False
    clock: int = 0  # of an Open: the steps of this worker that count already
    version: int = 0
    staleness: int = 0
    stops: bool = False  # of a commit, where all end a step together: one of them was asked to stop
    absent: tuple[int, ...] = ()
    codec: str = ""  # of an average: what follows is a packet that this codec reads
    speaker: int = -1  # of an average: the worker that sends how all workers have changed it
    delivers: bool = False  # tensors follow, because the worker is on another host
    # In the server's memory: the average, or the values by shard. Empty: they were delivered.
    places: tuple[Where, ...] = ()
    entries: tuple[EncodedStateEntry, ...] = ()
    spec: TableSpec | None = None
    reports: tuple[Any, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def is_more(self) -> bool:
        """Whether the worker needs more of the server: tensors, or its memory."""
        return self.delivers or bool(self.places)


AnyRequest: TypeAlias = (
    Open
    | Find
    | Assign
    | Push
    | Replace
    | Commit
    | Pull
    | Peek
    | StandAside
    | Follow
    | Unfollow
    | Keys
    | FetchState
    | LoadState
    | Stats
    | Leave
)
