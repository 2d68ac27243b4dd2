"""Sends a snapshot of a partition's tables to another copy while updates continue, and restores it.

messages.py has its parts. A part is sent when the other server has taken the one before, and some
time has passed: workers wait for both copies meanwhile, and should not notice much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline import errors
from paceline.errors import ProtocolError
from paceline.ps import messages as m
from paceline.ps.placement import ELEMENTWISE
from paceline.ps.replication.messages import (
    NumberRange,
    Outline,
    ParkedSnapshot,
    PushSnapshot,
    SnapshotPart,
    TableSnapshot,
)
from paceline.ps.replication.replication import Replica
from paceline.ps.replication.wire import shapes_of
from paceline.ps.server.handlers import host_copy
from paceline.ps.server.optimizer import StateEntry
from paceline.ps.server.server import Server
from paceline.ps.server.table_requests import ParkedRequest, ServedTable
from paceline.ps.server.worker_memory import dtype_of
from paceline.ps.server.worker_statistics import PushedGradient
from paceline.ps.spec import TableSpec

_PART_BYTES = 2 << 20  # of values; as much again for each tensor of the optimizer's state
_GAP_S = 0.006  # from part to part
_AT_ONCE = 4  # parts, when the loop was busy in between
_FEW = 8  # messages that may be unread when the next part is sent

Tensors = list[torch.Tensor]


class SnapshotSender:
    """Sends a snapshot of one copy to another."""

    def __init__(
        self, server: Server, replica: Replica, peer: int, sees: Callable[[int], bool]
    ) -> None:
        """`sees(rank)`: whether the other server sees the memory of a worker."""
        self._server, self._replica, self.peer, self._sees = server, replica, peer, sees
        self._ranges = _ranges(server)
        self._last_s = time.monotonic()
        self.is_over = False

    def send_outline(self) -> None:
        """Send everything but the numbers."""
        tensors: Tensors = []
        served = tuple(self._form(one, tensors) for one in self._server.tables)
        callers = {caller.rank: caller.worker for caller in self._server.callers.values()}
        gone = tuple(sorted(self._server.gone))
        self._send(Outline(callers, gone, served, shapes_of(tensors)), tensors)

    def is_due(self, now_s: float, backlog: int) -> bool:
        """Return whether it is time for the next part."""
        return now_s >= self._last_s + _GAP_S and backlog <= _FEW

    def send_some(self, now_s: float) -> None:
        """Send the next parts, as many as the time allows, or the end."""
        num_parts = min(int((now_s - self._last_s) / _GAP_S), _AT_ONCE)
        self._last_s = now_s
        for _ in range(max(num_parts, 1)):
            if not self.is_over:
                self._send_range()

    def _send_range(self) -> None:
        found = next(self._ranges, None)
        if found is None:
            self._replica.filled(self.peer)
            self.is_over = True
            return
        table, shard, start, stop = found
        numbers = self._server.tables[table].table.numbers(shard, start, stop)
        copied = [flat.clone() for flat in numbers]  # updates continue meanwhile
        self._send(NumberRange(table, shard, start, stop, shapes_of(copied)), copied)

    def _send(self, part: SnapshotPart, tensors: Tensors) -> None:
        self.is_over = not self._replica.send_part(self.peer, (part, tensors))

    def _form(self, served: ServedTable, tensors: Tensors) -> TableSnapshot:
        table = served.table
        states = tuple(_state_form(shard.outline(), tensors) for shard in table.shards)
        pushes = tuple(
            self._push_form(served, "push", worker, shard, push, tensors)
            for worker, shard, push in table.pushed()
        )
        replaced = tuple(
            self._push_form(served, "replace", 0, shard, push, tensors)
            for shard, push in table.replaced()
        )
        return TableSnapshot(
            table.outline(),
            states,
            self._server.by_name.get(table.spec.name) is served,
            served.maker,
            served.buffers.opened,
            served.occupants,
            {worker: (type(e).__name__, str(e)) for worker, e in served.refusals.items()},
            pushes,
            replaced,
            {shard: _parked_forms(parked) for shard, parked in served.pushes.items()},
            _parked_forms(served.readers),
            _parked_forms(served.followers),
        )

    def _push_form(
        self,
        served: ServedTable,
        use: str,
        worker: int,
        shard: int,
        push: PushedGradient,
        tensors: Tensors,
    ) -> PushSnapshot:
        where = served.origins.get((use, worker, shard))
        is_sent = where is None or not self._sees(where.rank)
        if is_sent:
            tensors.append(push.grad)
        absent = tuple(sorted(push.absent))
        dtype = str(push.grad.dtype).removeprefix("torch.")
        return PushSnapshot(worker, shard, absent, where, dtype, is_sent)


def restore(server: Server, part: SnapshotPart, tensors: Sequence[torch.Tensor]) -> None:
    """Restore a part of another copy's snapshot."""
    if isinstance(part, NumberRange):
        _restore_range(server, part, tensors)
        return
    following = iter(tensors)
    for rank, number in part.callers.items():
        server.enter(rank, number)
    server.gone.update(part.gone)
    for form in part.hosted:
        _restore_hosted(server, form, following)


def _restore_range(server: Server, part: NumberRange, tensors: Sequence[torch.Tensor]) -> None:
    own = server.tables[part.table].table.numbers(part.shard, part.start, part.stop)
    if [flat.numel() for flat in own] != [flat.numel() for flat in tensors]:
        raise ProtocolError(
            f"server {server.index} received {len(tensors)} tensors of a snapshot for elements"
            f" {part.start} to {part.stop} of shard {part.shard}, but has {len(own)} there"
        )
    for flat, source in zip(own, tensors, strict=True):
        flat.copy_(source)


def _restore_hosted(server: Server, form: TableSnapshot, following: Iterator[torch.Tensor]) -> None:
    served = host_copy(server, form.table.spec, form.maker, is_named=form.is_named)
    table = served.table
    table.restore(form.table)
    for shard, entries in zip(table.shards, form.states, strict=True):
        if entries:
            shard.load_state([_state_of(entry, following) for entry in entries])
    served.buffers.opened, served.occupants = dict(form.buffers), dict(form.occupants)
    served.refusals = {w: errors.named(*refusal) for w, refusal in form.refusals.items()}
    for one in form.pushes:
        grad = _gradient(server, served, "push", one, following)
        table.push_again(one.worker, one.shard, PushedGradient(grad, frozenset(one.absent)))
    for one in form.replaced:
        grad = _gradient(server, served, "replace", one, following)
        table.replace_average(one.shard, grad, one.absent)
    served.pushes = {n: _parked(server, forms) for n, forms in form.parked_pushes.items()}
    served.readers = _parked(server, form.readers)
    served.followers = _parked(server, form.followers)


def _gradient(
    server: Server,
    served: ServedTable,
    use: str,
    form: PushSnapshot,
    following: Iterator[torch.Tensor],
) -> torch.Tensor:
    served.origins[use, form.worker, form.shard] = form.where
    if form.is_sent:
        return next(following)
    assert form.where is not None
    caller = server.callers[form.where.rank]
    return served.buffers.view(use, caller, form.shard, form.where, dtype_of(form.dtype))


def _parked(server: Server, forms: Sequence[ParkedSnapshot]) -> list[ParkedRequest]:
    return [
        ParkedRequest(
            server.callers[one.rank],
            one.seq,
            time.monotonic(),
            one.reads,
            one.into,
            one.after,
            one.follower,
        )
        for one in forms
    ]


def _parked_forms(parked: Sequence[ParkedRequest]) -> tuple[ParkedSnapshot, ...]:
    return tuple(
        ParkedSnapshot(one.caller.rank, one.seq, one.reads, one.into, one.after, one.follower)
        for one in parked
    )


def _state_form(state: Sequence[StateEntry], tensors: Tensors) -> tuple[m.EncodedStateEntry, ...]:
    entries = []
    for entry in state:
        value = entry.value
        if not isinstance(value, torch.Tensor):
            entries.append(m.EncodedStateEntry(entry.piece, entry.key, value))
            continue
        if value.numel() == 1:
            tensors.append(value.reshape(-1).clone())  # the next step changes it
        dtype = str(value.dtype).removeprefix("torch.")
        entries.append(m.EncodedStateEntry(entry.piece, entry.key, None, dtype, tuple(value.shape)))
    return tuple(entries)


def _state_of(entry: m.EncodedStateEntry, following: Iterator[torch.Tensor]) -> StateEntry:
    if not entry.dtype:
        assert entry.value is not None
        return StateEntry(entry.piece, entry.key, entry.value)
    zeros = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
    if zeros.numel() == 1:
        zeros.copy_(next(following).view(entry.shape))
    return StateEntry(entry.piece, entry.key, zeros)


def _ranges(server: Server) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ranges of a snapshot: table, shard, start, stop."""
    for number, served in enumerate(list(server.tables)):
        for shard in served.table.shards:
            count, itemsize = shard.spec.count, shard.params.element_size()
            most = max(_PART_BYTES // itemsize, 1)
            if not _is_elementwise(served.table.spec):
                most = max(count, 1)
            for start in range(0, count, most):
                yield number, served.table.shards.index(shard), start, min(start + most, count)


def _is_elementwise(spec: TableSpec) -> bool:
    return spec.rule.push != "grad" or spec.optimizer.name in ELEMENTWISE
