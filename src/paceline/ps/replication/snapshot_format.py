"""The state of a partition's tables on its way to another copy, as typed values.

First comes everything but the numbers (`Outline`), as it is after one entry; then, shard by shard,
RANGES of the numbers, each as it is when it is sent. In between the other copy applies entries to
what it has so far; a range that comes later replaces whatever that made of it. This is exact
because an element's new values depend on nothing but its old ones and the gradients; where they do
(some optimizers look at whole matrices), a shard is sent in one range.

Tensors follow the message, in the order in which they are named here.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from paceline.observe.telemetry.staleness import TableReport
from paceline.ps import messages as m
from paceline.ps.server.clock import WorkerClock
from paceline.ps.server.worker_clocks import Outcome
from paceline.ps.spec import Count, TableSpec

Absent: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[tuple[str, Count], ...]  # dtype, elements


class PushForm(msgspec.Struct, frozen=True, array_like=True):
    """A gradient that was pushed and is needed: where it lies, or that it follows."""

    worker: int
    shard: int
    absent: Absent
    where: m.Where | None
    dtype: str
    is_sent: bool


class BarrierForm(msgspec.Struct, frozen=True, tag=True):
    """A synchronous table's step under way."""

    known: tuple[tuple[int, Absent, dict[int, Absent]], ...]  # averages: shard, lacks, whose
    committed: tuple[int, ...]
    verdicts: dict[int, str]
    notices: dict[int, str]
    orphaned: str
    counted: tuple[tuple[int, int], ...]
    inherited: tuple[int, ...]
    ended: dict[int, tuple[Absent, str]]
    last_clock: int


class FirstArrivalsForm(msgspec.Struct, frozen=True, tag=True):
    """A round of a synchronous table with backup workers."""

    barrier: BarrierForm
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


class ArrivalsForm(msgspec.Struct, frozen=True, tag=True):
    """What a free-running table has besides what was pushed."""

    given: tuple[tuple[int, int], ...]  # (worker, shard): values that it computes from
    pooled: dict[int, Absent]  # by shard
    num_pooled: int
    pool_settings: tuple[dict[str, Any], ...]


class TableForm(msgspec.Struct, frozen=True):
    """A table, without its numbers."""

    spec: TableSpec
    is_assigned: tuple[bool, ...]  # by shard
    version: int
    clocks: dict[int, WorkerClock]
    settings: dict[int, tuple[dict[str, Any], ...]]
    outcomes: dict[int, Outcome]
    unread: tuple[int, ...]
    being_read: dict[int, tuple[int, ...]]
    vacant: tuple[int, ...]
    left_at: dict[int, int]
    may_repeat: tuple[int, ...]
    repeating: tuple[int, ...]
    way: BarrierForm | FirstArrivalsForm | ArrivalsForm
    report: TableReport


class ParkedForm(msgspec.Struct, frozen=True, array_like=True):
    """A request that is answered later."""

    rank: int
    seq: int
    reads: bool
    into: tuple[m.Where, ...]
    after: int
    follower: int


class HostedForm(msgspec.Struct, frozen=True):
    """A table, and who uses it."""

    table: TableForm
    states: tuple[tuple[m.Entry, ...], ...]  # by shard: what the optimizer has; small ones follow
    is_named: bool  # it can be found; its maker did not give up
    maker: int
    seats: dict[int, m.Open]
    occupants: dict[int, int]
    refusals: dict[int, tuple[str, str]]
    pushes: tuple[PushForm, ...]  # those that are needed
    replaced: tuple[PushForm, ...]  # what took the places of averages
    parked_pushes: dict[int, tuple[ParkedForm, ...]]  # by shard
    readers: tuple[ParkedForm, ...]
    followers: tuple[ParkedForm, ...]


class Outline(msgspec.Struct, frozen=True, tag=True):
    """Everything but the numbers."""

    callers: dict[int, int]  # rank: number
    gone: tuple[int, ...]
    hosted: tuple[HostedForm, ...]
    shapes: Shapes  # of the tensors that follow


class Range(msgspec.Struct, frozen=True, tag=True):
    """The numbers of some elements of a shard: values, then whatever goes with them."""

    table: int
    shard: int
    start: Count
    stop: Count
    shapes: Shapes  # of the tensors that follow


Part: TypeAlias = Outline | Range
