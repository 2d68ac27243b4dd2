"""Messages between servers about the copies of a partition, as typed values.

The messages of chain.py travel inside these. Tensors follow a message where the other server cannot
see the worker's memory, and with the parts of a snapshot, in the order in which they are named.

A SNAPSHOT is the state of a partition's tables on its way to another copy. First comes everything
but the numbers (`Outline`), as it is after one log entry; then, shard by shard, RANGES of the
numbers, each as it is when it is sent. In between the other copy applies entries to what it has so
far; a range that arrives later replaces the result. This is exact because an element's new values
depend on nothing but its old ones and the gradients; where they depend on more (some optimizers use
whole matrices), a shard is sent in one range.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from paceline.observe.telemetry.staleness import TableReport
from paceline.ps import messages as m
from paceline.ps.connection import decode
from paceline.ps.replication import chain as r
from paceline.ps.server.staleness_bound import WorkerClock
from paceline.ps.server.worker_statistics import StepOutcome
from paceline.ps.spec import Count, TableSpec

Absent: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[tuple[str, Count], ...]  # dtype, elements


class PushSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A pushed gradient that is still needed: where it lies, or that it follows."""

    worker: int
    shard: int
    absent: Absent
    where: m.Where | None
    dtype: str
    is_sent: bool


class SynchronousState(
    msgspec.Struct, frozen=True, tag="BarrierForm", rename={"problems": "verdicts"}
):
    """A synchronous table's step under way."""

    known: tuple[
        tuple[int, Absent, dict[int, Absent]], ...
    ]  # averages: shard, what it lacks, contributors
    committed: tuple[int, ...]
    problems: dict[int, str]
    notices: dict[int, str]
    orphaned: str
    counted: tuple[tuple[int, int], ...]
    inherited: tuple[int, ...]
    ended: dict[int, tuple[Absent, str]]
    last_clock: int


class BackupWorkerState(msgspec.Struct, frozen=True, tag="FirstArrivalsForm"):
    """A round of a synchronous table with backup workers."""

    barrier: SynchronousState
    members: tuple[int, ...]
    quorum: int
    withdrawn: tuple[int, ...]
    rounds: int
    read_at: dict[int, int]
    taken: dict[int, int]
    left: tuple[int, ...]
    stamps: tuple[dict[int, int], ...]  # by shard
    dropped: tuple[int, ...]
    credited: tuple[int, ...]


class AsynchronousState(msgspec.Struct, frozen=True, tag="ArrivalsForm"):
    """What an asynchronous table has besides pushed gradients."""

    given: tuple[tuple[int, int], ...]  # (worker, shard): copies of the values that the worker has
    pooled: dict[int, Absent]  # by shard
    num_pooled: int
    pool_settings: tuple[dict[str, Any], ...]


class TableState(msgspec.Struct, frozen=True, rename={"updates": "way"}):
    """A table, without its numbers."""

    spec: TableSpec
    is_assigned: tuple[bool, ...]  # by shard
    version: int
    clocks: dict[int, WorkerClock]
    settings: dict[int, tuple[dict[str, Any], ...]]
    outcomes: dict[int, StepOutcome]
    unread: tuple[int, ...]
    being_read: dict[int, tuple[int, ...]]
    vacant: tuple[int, ...]
    left_at: dict[int, int]
    may_repeat: tuple[int, ...]
    repeating: tuple[int, ...]
    updates: SynchronousState | BackupWorkerState | AsynchronousState
    report: TableReport


class ParkedSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A request that is answered later."""

    rank: int
    seq: int
    reads: bool
    into: tuple[m.Where, ...]
    after: int
    follower: int


class TableSnapshot(msgspec.Struct, frozen=True, rename={"buffers": "seats"}):
    """A table, and the workers that use it."""

    table: TableState
    states: tuple[
        tuple[m.EncodedStateEntry, ...], ...
    ]  # by shard: what the optimizer has; small ones follow
    is_named: bool  # it can be found: its maker has not left before it gave values
    maker: int
    buffers: dict[int, m.Open]
    occupants: dict[int, int]
    refusals: dict[int, tuple[str, str]]
    pushes: tuple[PushSnapshot, ...]  # those that are needed
    replaced: tuple[PushSnapshot, ...]  # what replaced averages
    parked_pushes: dict[int, tuple[ParkedSnapshot, ...]]  # by shard
    readers: tuple[ParkedSnapshot, ...]
    followers: tuple[ParkedSnapshot, ...]


class Outline(msgspec.Struct, frozen=True, tag=True):
    """A snapshot without the numbers."""

    callers: dict[int, int]  # rank: number
    gone: tuple[int, ...]
    hosted: tuple[TableSnapshot, ...]
    shapes: Shapes  # of the tensors that follow


class NumberRange(msgspec.Struct, frozen=True, tag="Range"):
    """The numbers of some elements of a shard: values, then whatever goes with them."""

    table: int
    shard: int
    start: Count
    stop: Count
    shapes: Shapes  # of the tensors that follow


SnapshotPart: TypeAlias = Outline | NumberRange


class RequestOp(msgspec.Struct, frozen=True, tag="Asked", omit_defaults=True):
    """A log entry: a worker's request."""

    request: m.AnyRequest
    error: str = ""  # why it was refused before it was handled: a class in paceline.errors
    text: str = ""
    how: Literal["named", "sent", "late"] = "named"  # its tensors; see wire.py
    late: tuple[int, ...] = ()  # with a commit: shards whose pushes follow, in their newest form


class WorkerEntered(msgspec.Struct, frozen=True, tag="Entered"):
    """A log entry: a worker has joined the job."""

    rank: m.Rank
    worker: int


class WorkerGone(msgspec.Struct, frozen=True, tag="Gone"):
    """A log entry: a worker has left the job; `vacates`: its slot waits for a replacement."""

    rank: m.Rank
    vacates: bool = False


class SlotClosed(msgspec.Struct, frozen=True, tag="Closed"):
    """A log entry: an open slot will not be filled."""

    worker: int


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """A log entry: the new order of the copies is in effect after it."""


Event: TypeAlias = WorkerEntered | WorkerGone | SlotClosed
Op: TypeAlias = RequestOp | WorkerEntered | WorkerGone | SlotClosed | HandedOver


class PeerMessage(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the messages between servers."""

    partition: int
    generation: int


class ControlMessage(PeerMessage, frozen=True, tag="Said"):
    """A message of chain.py that travels unchanged."""

    word: r.Begin | r.Standing | r.Ack | r.FillEnd


class ForwardMessage(PeerMessage, frozen=True, tag="Forward"):
    index: int
    rank: int
    seq: int
    op: Op
    again: bool = False
    shapes: Shapes = ()  # of the tensors that follow


class SnapshotStartMessage(PeerMessage, frozen=True, tag="FillStart"):
    index: int
    clients: dict[int, tuple[int, list[tuple[int, m.Reply]]]]


class SnapshotPartMessage(PeerMessage, frozen=True, tag="FillPart"):
    part: SnapshotPart


class VisibleWorkers(PeerMessage, frozen=True, tag="Sees"):
    """The workers whose memory the sender sees."""

    ranks: tuple[m.Rank, ...]


AnyMessage: TypeAlias = (
    VisibleWorkers | ControlMessage | ForwardMessage | SnapshotStartMessage | SnapshotPartMessage
)
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def read(frame: np.ndarray, rest: np.ndarray | None) -> AnyMessage:
    """Decode a message; BadFrame if it is none."""
    return decode(_decoder, frame, rest)  # type: ignore[no-any-return]
