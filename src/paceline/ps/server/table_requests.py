"""A table on a server: the requests of a step, and the requests that wait.

A worker PUSHES, COMMITS and reads. A request that cannot be answered yet is PARKED; the request
that changes that also answers it. The table itself (table.py) knows no sockets and no processes;
worker_memory.py reads and writes the workers' memory.

Backups run the same requests in the same order, so nothing here may depend on time, or on what has
arrived (statistics and notices excepted).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paceline.errors import PacelineError
from paceline.ps import messages as m
from paceline.ps.connection import Landing
from paceline.ps.server.precision import FLOATING
from paceline.ps.server.table import Table
from paceline.ps.server.worker_memory import (
    NOTHING,
    Caller,
    Delivery,
    Tensorful,
    WorkerBuffers,
)
from paceline.ps.server.worker_statistics import StepOutcome


@dataclass
class ParkedRequest:
    """A request that is answered later."""

    caller: Caller
    seq: int
    since_s: float
    reads: bool = True  # readers: answered with values
    into: tuple[m.Where, ...] = ()  # where values go; empty: to the worker's buffers
    after: int = 0  # followers: answered with a higher version
    follower: int = 0


class SendReply(Protocol):
    """Sends the reply to a request, with what belongs to it."""

    def __call__(
        self, caller: Caller, seq: int, delivery: Delivery = NOTHING, **fields: Any
    ) -> None: ...


@dataclass
class ServedTable:
    """One table, its workers' buffers, and its parked requests."""

    number: int
    table: Table
    buffers: WorkerBuffers
    maker: int  # the worker that gives it its first values
    answer: SendReply
    keeps_origins: bool  # for other copies
    occupants: dict[int, int] = field(default_factory=dict)  # by worker: the rank of its process
    # Where what was pushed or replaced lies, by ("push" or "replace", worker, shard).
    origins: dict[tuple[str, int, int], m.Where | None] = field(default_factory=dict)
    pushes: dict[int, list[ParkedRequest]] = field(
        default_factory=dict
    )  # by shard: they wait for its average
    readers: list[ParkedRequest] = field(default_factory=list)  # they wait for fresh values
    followers: list[ParkedRequest] = field(default_factory=list)
    refusals: dict[int, Exception] = field(default_factory=dict)  # by worker: of its pushes

    # -- the requests of a step ---------------------------------------------------------------

    def landing(self, caller: Caller, request: Tensorful, *, is_sent: bool) -> Landing:
        """Return where the tensor of a request is; usually the same place as the last time."""
        if isinstance(request, m.Push) and not (is_sent or request.codec):
            known = self.buffers.views.get(("push", caller.worker, request.shard))
            if known is not None and known[:2] == (request.where, FLOATING.get(request.dtype)):
                return Landing(known[2:])
        return self.buffers.landing(caller, request, is_sent=is_sent)

    def on_push(self, caller: Caller, request: m.Push, given: Sequence[torch.Tensor]) -> None:
        table, grad, where = self.table, given[0], request.where
        if request.codec:
            grad, where = self.buffers.unpack(caller, request, grad), None
        counts = table.push(caller.worker, request.shard, request.clock, grad, request.absent)
        if self.keeps_origins:
            self.origins["push", caller.worker, request.shard] = where
        if not table.spec.rule.aggregate:
            return
        if counts:
            parked = ParkedRequest(caller, request.seq, time.monotonic())
            self.pushes.setdefault(request.shard, []).append(parked)
        else:  # the step was applied, or is too late; the last average is still known
            self._send_average(
                caller, request.seq, request.shard, *table.last_average(request.shard)
            )
        self.release_averages()  # its other pushes may have been dropped as well

    def on_replace(self, caller: Caller, request: m.Replace, given: Sequence[torch.Tensor]) -> None:
        does_not_count = self.table.is_repeating(caller.worker)
        if not (does_not_count or self.table.has_dropped(caller.worker)):
            self.table.replace_average(request.shard, given[0], request.absent)
            if self.keeps_origins:
                self.origins["replace", 0, request.shard] = request.where
        self.answer(caller, request.seq)

    def on_commit(self, caller: Caller, request: m.Commit, _: Sequence[torch.Tensor]) -> None:
        refusal = self.refusals.pop(caller.worker, None)
        if refusal is not None:
            self.table.discard(caller.worker)
            raise refusal
        if not request.counts:
            self.table.discard(caller.worker)
        self.buffers.commit(caller, request)
        if request.reads or self.table.spec.rule.aggregate:
            now_s = time.monotonic()
            self.readers.append(
                ParkedRequest(caller, request.seq, now_s, request.reads, request.into)
            )
        else:
            self.answer(caller, request.seq, **_ending(self.table.outcome(caller.worker)))
        if self.table.spec.rule.backup:  # workers that wait for an average may be released
            self.release_averages()
        self.release()

    def on_pull(self, caller: Caller, request: m.Pull, _: Sequence[torch.Tensor]) -> None:
        if request.in_turn:
            parked = ParkedRequest(caller, request.seq, time.monotonic(), into=request.into)
            self.readers.append(parked)
            self.release()
            return
        delivery = self.buffers.values_for(caller, request.into)
        self.answer(caller, request.seq, delivery, version=self.table.version)

    # -- answering parked requests ------------------------------------------------------------

    def release_averages(self) -> None:
        """Answer pushes whose average is known now."""
        for shard in [shard for shard, waiting in self.pushes.items() if waiting]:
            if not self.table.is_reduced(shard):
                self._release_dropped(shard)
                continue
            absent, notice = self.table.absent(shard), self.table.problem(shard)
            for parked in self.pushes.pop(shard):
                self._send_average(parked.caller, parked.seq, shard, absent, notice)

    def _release_dropped(self, shard: int) -> None:
        """Answer pushes that were dropped: the average will not contain them."""
        waiting = self.pushes[shard]
        for parked in [one for one in waiting if self.table.has_dropped(one.caller.worker)]:
            waiting.remove(parked)
            last = self.table.last_average(shard)
            self._send_average(parked.caller, parked.seq, shard, *last)

    def _send_average(
        self, caller: Caller, seq: int, shard: int, absent: tuple[int, ...], notice: str
    ) -> None:
        delivery, speaker, codec = NOTHING, self.table.clocks.workers[0], ""
        if not self.buffers.is_shared or caller.worker not in self.buffers.opened:
            delivery, codec = self.buffers.average_for(caller, shard)
        self.answer(
            caller, seq, delivery, absent=absent, codec=codec, speaker=speaker, notice=notice
        )

    def release(self) -> None:
        """Answer the commits of workers that may read now, and followers of the version."""
        table = self.table
        for parked in list(self.readers):  # first come, first served
            if not table.may_read(
                parked.caller.worker
            ):  # each read may change which worker may read
                continue
            self.readers.remove(parked)
            self._end_wait(parked)
        can_change = bool(table.clocks.workers)
        if self.followers and (table.is_ready or not can_change):
            self.end_follow(lambda one: table.version > one.after or not can_change)

    def _end_wait(self, parked: ParkedRequest) -> None:
        """Answer a reader; if its own buffers are wrong, only its own reply is an error."""
        caller, outcome = parked.caller, self.table.outcome(parked.caller.worker)
        try:
            found = self.buffers.values_for(caller, parked.into) if parked.reads else NOTHING
        except PacelineError as error:
            self.answer(caller, parked.seq, error=type(error).__name__, text=str(error))
            return
        # No tensors may follow an error.
        self.answer(caller, parked.seq, NOTHING if outcome.error else found, **_ending(outcome))

    def end_follow(self, is_over: Callable[[ParkedRequest], bool]) -> None:
        """Send the version to followers."""
        for parked in [one for one in self.followers if is_over(one)]:
            self.followers.remove(parked)
            self.answer(parked.caller, parked.seq, version=self.table.version)

    def forget(self, caller: Caller) -> None:
        """Drop the parked requests of a worker that has left."""
        self.readers = [one for one in self.readers if one.caller is not caller]
        self.followers = [one for one in self.followers if one.caller is not caller]
        for parked in self.pushes.values():
            parked[:] = [one for one in parked if one.caller is not caller]
        self.refusals.pop(caller.worker, None)
        self.buffers.forget(caller.worker)


def _ending(outcome: StepOutcome) -> dict[str, Any]:
    """Return the outcome of a step, as fields of a reply."""
    return {
        "error": outcome.error,
        "text": outcome.text,
        "notice": outcome.notice,
        "version": outcome.version,
        "staleness": outcome.staleness,
        "stops": outcome.stops,
    }


STEP: Mapping[type, Callable[[ServedTable, Caller, Any, Sequence[torch.Tensor]], None]] = {
    m.Push: ServedTable.on_push,
    m.Replace: ServedTable.on_replace,
    m.Commit: ServedTable.on_commit,
    m.Pull: ServedTable.on_pull,
}
