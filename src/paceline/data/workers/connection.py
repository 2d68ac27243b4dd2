"""The line between an asker and a data worker: a group of two (ADR 0011), seen from either end.

On one host a batch stays in the memory of the data worker, and the asker looks at it there; between
hosts its bytes follow the reply. A receive needs a size before anything comes, so an order says for
how many bytes there is ROOM: as many as came last time. Those travel in the background, into memory
that is ready, while the asker computes; what did not fit follows as the TAIL.

A SLOT of that memory holds one batch from when it is written until the asker gives it back, which
it does when the last of the tensors in it is gone. Slots are then used again: their pages stay
mapped on both sides.

Errors of the engine (PeerError) say that the other end is gone.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from paceline import _core
from paceline.comm.fabric import Fabric
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.control.member import Member
from paceline.data.workers import messages as m
from paceline.data.workers.messages import Parcel
from paceline.errors import SharedMemoryError
from paceline.ps.connection import FRAME_BYTES, rest_bytes, to_frames
from paceline.runtime.console import say
from paceline.runtime.work import Work

_MAKER, _ASKER = 0, 1  # their ranks in the group
_REMEMBERED = 8  # sizes
_PAGE = 4096


def form(fabric: Fabric, maker: Member, asker: Member) -> Group:
    """Form this process's end of a line. Blocks until the other end is there, on the asker."""
    for member in (maker, asker):
        fabric.link(member)
    name = f"data {maker.rank} {asker.rank}"
    # Making a batch takes as long as it takes; who is gone or stopped is noticed all the same.
    return Group(fabric, (maker.rank, asker.rank), math.inf, name=name)


@dataclass
class Incoming:
    """A reply that is waited for, and where it lands."""

    seq: int
    frame: np.ndarray
    work: Work[int]
    payload: torch.Tensor | None = None
    receiving: Work[int] | None = None


class AskingLine:
    """The end of a trainer, or of the next stage."""

    def __init__(self, fabric: Fabric, member: Member, group: Group) -> None:
        self.member = member
        self.is_local = member.host_id == fabric.me.host_id
        self.held = 0  # slots whose tensors are still in use here
        self.outstanding = 0  # orders without a reply
        self._fabric, self._group = fabric, group
        self._seq = 0
        self._released: deque[int] = deque()  # appended to by whoever drops the last tensor
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def ask(self, make: Callable[[int, tuple[int, ...], int], m.Order]) -> Incoming:
        """Send the order that `make(seq, released, room)` returns."""
        self._seq += 1
        room = 0 if self.is_local or not self._sizes else min(self._sizes)
        incoming = self._expect(self._seq, room)
        frame, rest = to_frames(make(self._seq, self._take_released(), room))
        self._group.send(frame, _MAKER, tag=m.ORDER, async_op=True)
        if rest is not None:
            self._group.send(rest, _MAKER, tag=m.ORDER_REST, async_op=True)
        self.outstanding += 1
        return incoming

    def read(self, incoming: Incoming) -> tuple[m.Reply, torch.Tensor | None]:
        """Take a reply whose frame has come, and the memory in which its tensors lie."""
        size, rest = rest_bytes(incoming.frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self._group.recv(rest, _MAKER, tag=m.rest_tag(incoming.seq))
        reply = m.read_reply(incoming.frame, rest)
        if reply.slot is not None:
            return reply, self._look_at(reply.slot, reply.num_bytes)
        return reply, self._receive(reply, incoming)

    def close(self) -> None:
        """Give up the line."""
        self._group.close()

    def _expect(self, seq: int, room: int) -> Incoming:
        frame = np.empty(FRAME_BYTES, dtype=np.uint8)
        incoming = Incoming(seq, frame, self._get(frame, m.reply_tag(seq)))
        if room:
            incoming.payload = torch.empty(room, dtype=torch.uint8)
            incoming.receiving = self._get(incoming.payload, m.payload_tag(seq))
        return incoming

    def _get(self, target: np.ndarray | torch.Tensor, tag: int) -> Work[int]:
        work = self._group.recv(target, _MAKER, tag=tag, async_op=True)
        assert isinstance(work, Work)
        return work

    def _look_at(self, slot: m.Slot, num_bytes: int) -> torch.Tensor:
        engine, owner = self._fabric.engine, self.member.rank
        seen = engine.memory_of_peer(owner, slot.segment, slot.offset, num_bytes)
        self.held += 1
        # The tensor keeps the array, and every view of the tensor does so too.
        weakref.finalize(seen, self._released.append, slot.number).atexit = False
        return torch.from_numpy(seen)

    def _take_released(self) -> tuple[int, ...]:
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        self.held -= len(released)
        return released

    def _receive(self, reply: m.Reply, incoming: Incoming) -> torch.Tensor | None:
        """Take the bytes that follow a reply."""
        head, total = incoming.payload, reply.num_bytes
        if incoming.receiving is not None:
            incoming.receiving.wait()
        if reply.problem:
            return None
        self._sizes.append(total)
        if head is not None and head.numel() >= total:
            return head
        whole = torch.empty(total, dtype=torch.uint8)
        start = 0
        if head is not None:
            start = head.numel()
            whole[:start] = head
        if total > start:
            self._group.recv(whole[start:], _MAKER, tag=m.tail_tag(incoming.seq))
        return whole


@dataclass(eq=False)
class _Room:
    memory: torch.Tensor
    where: m.Slot


class Slots:
    """The slots for one asker."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._free: list[_Room] = []
        self._taken: dict[int, _Room] = {}
        self._made = 0

    def take(self, num_bytes: int) -> tuple[torch.Tensor, m.Slot]:
        """Return memory for a batch; raises SharedMemoryError."""
        fitting = [room for room in self._free if room.memory.numel() >= num_bytes]
        if fitting:
            room = min(fitting, key=lambda room: room.memory.numel())
            self._free.remove(room)
        else:
            if self._free:  # all of them are too small: let one go instead of keeping both
                self._free.remove(min(self._free, key=lambda room: room.memory.numel()))
            room = self._make(num_bytes)
        self._taken[room.where.number] = room
        return room.memory, room.where

    def give_back(self, number: int) -> None:
        """Use a slot again; without effect for one that is not taken."""
        room = self._taken.pop(number, None)
        if room is not None:
            self._free.append(room)

    def _make(self, num_bytes: int) -> _Room:
        # A little more than is needed now: batches of variable length shall fit next time.
        size = -(-(num_bytes + num_bytes // 8) // _PAGE) * _PAGE
        memory = allocate(self._engine, (size,), torch.uint8)
        self._made += 1
        return _Room(memory, m.Slot(self._made, *self._engine.locate(memory.data_ptr(), size)))


class MakingLine:
    """The end of a data worker."""

    def __init__(self, fabric: Fabric, member: Member, group: Group) -> None:
        self.member = member
        self._group = group
        self._slots = Slots(fabric.engine) if member.host_id == fabric.me.host_id else None
        self._engine = fabric.engine
        self._has_spoken = False
        self._post()

    @property
    def receiving(self) -> Work[int]:
        """What ends when the next order is there."""
        return self._receive

    def take(self) -> m.Order:
        """Read the order that has come, and get ready for the next; raises PeerError."""
        self._receive.wait()
        size, rest = rest_bytes(self._frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self._group.recv(rest, None, tag=m.ORDER_REST)
        order = m.read_order(self._frame, rest)
        self._post()
        if self._slots is not None:
            for number in order.released:
                self._slots.give_back(number)
        return order

    def deliver(self, order: m.Order, parcel: Parcel) -> None:
        """Send what was made; raises PeerError."""
        if self._slots is not None and parcel.num_bytes:
            try:
                memory, slot = self._slots.take(parcel.num_bytes)
            except SharedMemoryError as error:
                self._say_once(f"batches are copied to {self.member.where} instead: {error}")
            else:
                parcel.write(memory)
                self._engine.count_sent(parcel.num_bytes)
                self._send(m.Reply(order.seq, parcel.plain, parcel.num_bytes, slot))
                return
        # Between hosts, or without memory to share; this one lives until it is sent.
        memory = torch.empty(max(parcel.num_bytes, order.room), dtype=torch.uint8)
        parcel.write(memory)
        self._send(m.Reply(order.seq, parcel.plain, parcel.num_bytes))
        self._follow(order, memory)

    def refuse(self, order: m.Order, problem: str, text: str) -> None:
        """Say why nothing was made."""
        self._send(m.Reply(order.seq, problem=problem, text=text))
        if self._slots is None:
            self._follow(order, torch.empty(order.room, dtype=torch.uint8))

    def close(self) -> None:
        """Give up the line."""
        self._group.close()

    def _post(self) -> None:
        self._frame = np.empty(FRAME_BYTES, dtype=np.uint8)
        # From "any" of one: an asker that is stopped or busy for long is no error here.
        work = self._group.recv(self._frame, None, tag=m.ORDER, async_op=True, background=False)
        assert isinstance(work, Work)
        self._receive = work

    def _send(self, reply: m.Reply) -> None:
        frame, rest = to_frames(reply)
        self._group.send(frame, _ASKER, tag=m.reply_tag(reply.seq), async_op=True)
        if rest is not None:
            self._group.send(rest, _ASKER, tag=m.rest_tag(reply.seq), async_op=True)

    def _say_once(self, text: str) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            say(text)

    def _follow(self, order: m.Order, memory: torch.Tensor) -> None:
        if order.room:
            head = memory[: order.room]
            self._group.send(head, _ASKER, tag=m.payload_tag(order.seq), async_op=True)
        if memory.numel() > order.room:
            tail = memory[order.room :]
            self._group.send(tail, _ASKER, tag=m.tail_tag(order.seq), async_op=True)
