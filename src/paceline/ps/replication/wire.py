"""Messages of chain replication, converted to messages between servers and back.

Tensors of a request are named, not sent, if the other server is on the worker's host and sees them
where they lie. Otherwise they follow: at once, or, for a push to an asynchronous table, LATE, with
its commit. Until the commit the worker may still change them, and a server of its host would read
the changed values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline import errors
from paceline.ps import messages as m
from paceline.ps.replication import chain as r
from paceline.ps.replication import messages as p
from paceline.ps.replication.messages import Shapes
from paceline.ps.server.server import Server, ServerRequest

Tensors = Sequence[torch.Tensor]
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def encode(
    partition: int, message: r.Message, server: Server, *, sees_worker: bool
) -> tuple[p.AnyMessage, Tensors]:
    """Return a message, and the tensors that follow it.

    `sees_worker`: the receiver sees the memory of the worker whose request it is.
    """
    generation = message.generation
    if isinstance(message, r.Forward):
        entry = message.entry
        op, tensors = _op(entry, server, sees_worker=sees_worker)
        forward = p.ForwardMessage(
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
        return p.SnapshotPartMessage(partition, generation, part), tensors
    if isinstance(message, r.FillStart):
        return p.SnapshotStartMessage(partition, generation, message.index, message.clients), ()
    return p.ControlMessage(partition, generation, message), ()


def _op(entry: r.LogEntry, server: Server, *, sees_worker: bool) -> tuple[p.Op, Tensors]:
    op = entry.op
    if op == r.HANDOVER:
        return p.HandedOver(), ()
    if not isinstance(op, ServerRequest):
        return op, ()
    request = op.request
    if op.refusal is not None:
        return p.RequestOp(request, type(op.refusal).__name__, str(op.refusal)), ()
    if isinstance(request, m.LoadState):
        return p.RequestOp(request, how="sent"), op.tensors
    if isinstance(request, m.Assign | m.Push | m.Replace):
        if request.where is not None and sees_worker:
            return p.RequestOp(request), ()
        if request.where is not None and isinstance(request, m.Push) and not request.codec:
            table = server.tables[request.table].table
            if not table.spec.rule.aggregate:
                return p.RequestOp(request, how="late"), ()
        return p.RequestOp(request, how="sent"), op.tensors
    if op.late and not sees_worker:
        late, tensors = zip(*op.late, strict=True)
        return p.RequestOp(request, late=late), tensors
    return p.RequestOp(request), ()


def landing(message: p.AnyMessage, server: Server, index: int) -> Tensors:
    """Return where the tensors that follow a message are received; `index`: applied so far."""
    if isinstance(message, p.SnapshotPartMessage):
        return _room(message.part.shapes)
    if not isinstance(message, p.ForwardMessage) or not message.shapes:
        return ()
    op, caller = message.op, server.callers.get(message.rank)
    is_next = message.index == index + 1  # a repeated entry must not overwrite anything
    if isinstance(op, p.RequestOp) and op.how == "sent" and is_next and caller is not None:
        try:
            found = server.find_landing(caller, op.request, is_sent=True).tensors
        except errors.PacelineError:  # it will be refused when it is applied
            found = ()
        if shapes_of(found) == message.shapes:
            return found
    return _room(message.shapes)


def _room(shapes: Shapes) -> Tensors:
    try:
        return [torch.empty(count, dtype=_DTYPES[dtype]) for dtype, count in shapes]
    except (KeyError, RuntimeError) as error:
        raise errors.BadFrame(f"tensors of a server cannot be received: {error}") from None


def shapes_of(tensors: Tensors) -> Shapes:
    """Return the shapes of tensors that follow a message."""
    return tuple((str(one.dtype).removeprefix("torch."), one.numel()) for one in tensors)


def decode(message: p.AnyMessage, tensors: Tensors) -> r.Message:
    """Return the message of chain replication in a message of another server."""
    generation = message.generation
    if isinstance(message, p.ForwardMessage):
        entry = r.LogEntry(
            message.index,
            message.rank,
            message.seq,
            _received(message, tensors),
            message.again,
        )
        return r.Forward(generation, entry)
    if isinstance(message, p.SnapshotPartMessage):
        return r.FillPart(generation, (message.part, tensors))
    if isinstance(message, p.SnapshotStartMessage):
        return r.FillStart(generation, message.index, message.clients)
    assert isinstance(message, p.ControlMessage), message
    return message.word


def _received(message: p.ForwardMessage, tensors: Tensors) -> object:
    op = message.op
    if isinstance(op, p.HandedOver):
        return r.HANDOVER
    if not isinstance(op, p.RequestOp):
        return op
    if op.error:
        return ServerRequest(op.request, refusal=errors.named(op.error, op.text))
    if op.how == "sent":
        return ServerRequest(op.request, tensors)
    if op.late:
        return ServerRequest(op.request, late=tuple(zip(op.late, tensors, strict=True)))
    return ServerRequest(op.request, how=op.how)
