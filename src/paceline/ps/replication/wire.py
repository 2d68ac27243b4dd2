"""Entries and other words of replication, turned into messages between servers and back.

Tensors of a request are named, not sent, if the other server is on the worker's host and sees them
where they lie. Otherwise they follow: at once, or, for a push of a free-running worker, LATE, with
its commit. Until then the worker may still change them, and on its own host nobody would notice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline import errors
from paceline.ps import messages as m
from paceline.ps.replication import chain as r
from paceline.ps.replication import messages as p
from paceline.ps.replication.snapshot_format import Shapes
from paceline.ps.server.server import Asked, Server

Tensors = Sequence[torch.Tensor]


def encode(
    partition: int, message: r.Message, server: Server, *, sees_worker: bool
) -> tuple[p.AnyMessage, Tensors]:
    """Return a message, and the tensors that follow it. `sees_worker`: whose request it is."""
    generation = message.generation
    if isinstance(message, r.Forward):
        entry = message.entry
        op, tensors = _op(entry, server, sees_worker=sees_worker)
        forward = p.Forward(
            partition,
            generation,
            entry.index,
            entry.rank,
            entry.seq,
            op,
            entry.again,
            shapes_of(tensors),
        )
        return forward, tensors
    if isinstance(message, r.FillPart):
        part, tensors = message.content
        return p.FillPart(partition, generation, part), tensors
    if isinstance(message, r.FillStart):
        return p.FillStart(partition, generation, message.index, message.clients), ()
    return p.Said(partition, generation, message), ()


def _op(entry: r.Entry, server: Server, *, sees_worker: bool) -> tuple[p.Op, Tensors]:
    op = entry.op
    if op == r.HANDOVER:
        return p.HandedOver(), ()
    if not isinstance(op, Asked):
        return op, ()
    request = op.request
    if op.refusal is not None:
        return p.Asked(request, type(op.refusal).__name__, str(op.refusal)), ()
    if isinstance(request, m.LoadState):
        return p.Asked(request, how="sent"), op.tensors
    if isinstance(request, m.Assign | m.Push | m.Replace):
        if request.where is not None and sees_worker:
            return p.Asked(request), ()
        if request.where is not None and isinstance(request, m.Push) and not request.codec:
            table = server.hosted[request.table].table
            if not table.spec.rule.aggregate:
                return p.Asked(request, how="late"), ()
        return p.Asked(request, how="sent"), op.tensors
    if op.late and not sees_worker:
        late, tensors = zip(*op.late, strict=True)
        return p.Asked(request, late=late), tensors
    return p.Asked(request), ()


def landing(message: p.AnyMessage, server: Server, index: int) -> Tensors:
    """Return where the tensors that follow a message are received; `index`: applied so far."""
    if isinstance(message, p.FillPart):
        return _room(message.part.shapes)
    if not isinstance(message, p.Forward) or not message.shapes:
        return ()
    op, caller = message.op, server.callers.get(message.rank)
    is_next = message.index == index + 1  # what comes again must not disturb anything
    if isinstance(op, p.Asked) and op.how == "sent" and is_next and caller is not None:
        try:
            found = server.find_landing(caller, op.request, is_sent=True).tensors
        except errors.PacelineError:  # it will be refused when it is its turn
            found = ()
        if shapes_of(found) == message.shapes:
            return found
    return _room(message.shapes)


def _room(shapes: Shapes) -> Tensors:
    return [torch.empty(count, dtype=getattr(torch, dtype)) for dtype, count in shapes]


def shapes_of(tensors: Tensors) -> Shapes:
    """Describe tensors that follow a message."""
    return tuple((str(one.dtype).removeprefix("torch."), one.numel()) for one in tensors)


def decode(message: p.AnyMessage, tensors: Tensors) -> r.Message:
    """Return what another server's message means."""
    generation = message.generation
    if isinstance(message, p.Forward):
        entry = r.Entry(
            message.index,
            message.rank,
            message.seq,
            _asked(message, tensors),
            message.again,
        )
        return r.Forward(generation, entry)
    if isinstance(message, p.FillPart):
        return r.FillPart(generation, (message.part, tensors))
    if isinstance(message, p.FillStart):
        return r.FillStart(generation, message.index, message.clients)
    assert isinstance(message, p.Said), message
    return message.word


def _asked(message: p.Forward, tensors: Tensors) -> object:
    op = message.op
    if isinstance(op, p.HandedOver):
        return r.HANDOVER
    if not isinstance(op, p.Asked):
        return op
    if op.error:
        return Asked(op.request, refusal=errors.named(op.error, op.text))
    if op.how == "sent":
        return Asked(op.request, tensors)
    if op.late:
        return Asked(op.request, late=tuple(zip(op.late, tensors, strict=True)))
    return Asked(op.request, how=op.how)
