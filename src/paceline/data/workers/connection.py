"""The connection between a client and a data worker: a group of two (ADR 0011), seen from each end.

On one host a batch stays in the memory of the data worker, and the client maps that memory. Between
hosts the bytes follow the reply. A receive needs a size before anything arrives, so a request says
for how many bytes the client has ROOM: as many as the last batches had. Those travel in the
background into prepared memory, while the client computes. The rest follows as the TAIL.

A SLOT of shared memory holds one batch from when it is written until the client returns the slot,
which it does when the last tensor in it is freed. Slots are then used again: their pages stay
mapped on both sides.

Errors of the engine (PeerError) mean that the other end is gone.
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
from paceline.comm.devices import pinned_bytes
from paceline.comm.fabric import Fabric
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.control.member import Member
from paceline.data.workers import messages as m
from paceline.data.workers.messages import PackedValue
from paceline.errors import SharedMemoryError
from paceline.ps.connection import FRAME_BYTES, rest_bytes, to_frames
from paceline.runtime.console import say
from paceline.runtime.work import Work

_WORKER, _CLIENT = 0, 1  # their ranks in the group
_REMEMBERED = 8  # sizes
_PAGE = 4096


def form(fabric: Fabric, worker: Member, client: Member) -> Group:
    """Form this process's end of a connection. On the client it blocks until the other end
    exists."""
    for member in (worker, client):
        fabric.link(member)
    name = f"data {worker.rank} {client.rank}"
    # No timeout: a batch may take long. A peer that is gone or stopped is noticed anyway.
    return Group(fabric, (worker.rank, client.rank), math.inf, name=name)


@dataclass
class IncomingBatch:
    """A reply that is awaited, and the memory for it."""

    seq: int
    frame: np.ndarray
    work: Work[int]
    payload: torch.Tensor | None = None
    receiving: Work[int] | None = None


class DataWorkerConnection:
    """A client's connection to a data worker. The client is a trainer or the next stage."""

    def __init__(
        self,
        fabric: Fabric,
        member: Member,
        group: Group,
        *,
        pins: Callable[[], bool] = bool,  # whether batches from another host go to pinned memory
    ) -> None:
        self.member, self._pins = member, pins
        self.is_local = member.host_id == fabric.me.host_id
        self.held = 0  # slots whose tensors are still in use here
        self.outstanding = 0  # requests without a reply
        self._fabric, self._group = fabric, group
        self._seq = 0
        self._released: deque[int] = deque()  # appended to when the last tensor of a slot is freed
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def send(self, make: Callable[[int, tuple[int, ...], int], m.BatchRequest]) -> IncomingBatch:
        """Send the request that `make(seq, released, room)` returns."""
        self._seq += 1
        room = 0 if self.is_local or not self._sizes else min(self._sizes)
        incoming = self._expect(self._seq, room)
        frame, rest = to_frames(make(self._seq, self._take_released(), room))
        self._group.send(frame, _WORKER, tag=m.REQUEST, async_op=True)
        if rest is not None:
            self._group.send(rest, _WORKER, tag=m.REQUEST_REST, async_op=True)
        self.outstanding += 1
        return incoming

    def read(self, incoming: IncomingBatch) -> tuple[m.BatchReply, torch.Tensor | None]:
        """Return a reply whose frame has arrived, and the memory with its tensors."""
        size, rest = rest_bytes(incoming.frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self._group.recv(rest, _WORKER, tag=m.tag_of(incoming.seq, m.REST))
        reply = m.read_reply(incoming.frame, rest)
        if reply.slot is not None:
            return reply, self._map_slot(reply.slot, reply.num_bytes)
        return reply, self._receive(reply, incoming)

    def close(self) -> None:
        """Close the connection."""
        self._group.close()

    def _expect(self, seq: int, room: int) -> IncomingBatch:
        frame = np.empty(FRAME_BYTES, dtype=np.uint8)
        incoming = IncomingBatch(seq, frame, self._get(frame, m.tag_of(seq, m.REPLY)))
        if room:
            incoming.payload = self._empty(room)
            incoming.receiving = self._get(incoming.payload, m.tag_of(seq, m.PAYLOAD))
        return incoming

    def _empty(self, size: int) -> torch.Tensor:
        pinned = pinned_bytes(size) if self._pins() else None
        return torch.empty(size, dtype=torch.uint8) if pinned is None else pinned

    def _get(self, target: np.ndarray | torch.Tensor, tag: int) -> Work[int]:
        work = self._group.recv(target, _WORKER, tag=tag, async_op=True)
        assert isinstance(work, Work)
        return work

    def _map_slot(self, slot: m.SharedSlot, num_bytes: int) -> torch.Tensor:
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

    def _receive(self, reply: m.BatchReply, incoming: IncomingBatch) -> torch.Tensor | None:
        """Receive the bytes that follow a reply."""
        head, total = incoming.payload, reply.num_bytes
        if incoming.receiving is not None:
            incoming.receiving.wait()
        if reply.problem:
            return None
        self._sizes.append(total)
        if head is not None and head.numel() >= total:
            return head
        payload = self._empty(total)
        start = 0
        if head is not None:
            start = head.numel()
            payload[:start] = head
        if total > start:
            self._group.recv(payload[start:], _WORKER, tag=m.tag_of(incoming.seq, m.TAIL))
        return payload


@dataclass(eq=False)
class _SlotMemory:
    memory: torch.Tensor
    where: m.SharedSlot


class SlotPool:
    """The slots for one client."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._free: list[_SlotMemory] = []
        self._taken: dict[int, _SlotMemory] = {}
        self._made = 0

    def take(self, num_bytes: int) -> tuple[torch.Tensor, m.SharedSlot]:
        """Return memory for a batch; raises SharedMemoryError."""
        fitting = [room for room in self._free if room.memory.numel() >= num_bytes]
        if fitting:
            room = min(fitting, key=lambda room: room.memory.numel())
            self._free.remove(room)
        else:
            if self._free:  # all are too small: free one instead of keeping both
                self._free.remove(min(self._free, key=lambda room: room.memory.numel()))
            room = self._make(num_bytes)
        self._taken[room.where.number] = room
        return room.memory, room.where

    def give_back(self, number: int) -> None:
        """Return a slot; no effect if it is not taken."""
        room = self._taken.pop(number, None)
        if room is not None:
            self._free.append(room)

    def _make(self, num_bytes: int) -> _SlotMemory:
        # Larger than needed, so that batches of variable length fit next time.
        size = -(-(num_bytes + num_bytes // 8) // _PAGE) * _PAGE
        memory = allocate(self._engine, (size,), torch.uint8)
        self._made += 1
        return _SlotMemory(
            memory, m.SharedSlot(self._made, *self._engine.locate(memory.data_ptr(), size))
        )


class ClientConnection:
    """A data worker's connection to a client."""

    def __init__(self, fabric: Fabric, member: Member, group: Group) -> None:
        self.member = member
        self._group = group
        self._slots = SlotPool(fabric.engine) if member.host_id == fabric.me.host_id else None
        self._engine = fabric.engine
        self._has_logged = False
        self._post()

    @property
    def receiving(self) -> Work[int]:
        """The receive of the next request."""
        return self._receive

    def take(self) -> m.BatchRequest:
        """Return the request that has arrived, and receive the next; raises PeerError."""
        self._receive.wait()
        size, rest = rest_bytes(self._frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self._group.recv(rest, None, tag=m.REQUEST_REST)
        request = m.read_request(self._frame, rest)
        self._post()
        if self._slots is not None:
            for number in request.released:
                self._slots.give_back(number)
        return request

    def deliver(self, request: m.BatchRequest, packed: PackedValue) -> None:
        """Send a batch; raises PeerError."""
        if self._slots is not None and packed.num_bytes:
            try:
                memory, slot = self._slots.take(packed.num_bytes)
            except SharedMemoryError as error:
                self._log_once(f"batches are copied to {self.member.where} instead: {error}")
            else:
                packed.write(memory)
                self._engine.count_sent(packed.num_bytes)
                self._send(m.BatchReply(request.seq, packed.plain, packed.num_bytes, slot))
                return
        # Between hosts, or without shared memory. The send keeps this memory alive.
        memory = torch.empty(max(packed.num_bytes, request.room), dtype=torch.uint8)
        packed.write(memory)
        self._send(m.BatchReply(request.seq, packed.plain, packed.num_bytes))
        self._send_payload(request, memory)

    def refuse(self, request: m.BatchRequest, problem: str, text: str) -> None:
        """Send the reason why there is no batch."""
        self._send(m.BatchReply(request.seq, problem=problem, text=text))
        if self._slots is None:
            self._send_payload(request, torch.empty(request.room, dtype=torch.uint8))

    def close(self) -> None:
        """Close the connection."""
        self._group.close()

    def _post(self) -> None:
        self._frame = np.empty(FRAME_BYTES, dtype=np.uint8)
        # From "any" rank: a client that is stopped or busy for long is no error here.
        work = self._group.recv(self._frame, None, tag=m.REQUEST, async_op=True, background=False)
        assert isinstance(work, Work)
        self._receive = work

    def _send(self, reply: m.BatchReply) -> None:
        frame, rest = to_frames(reply)
        self._group.send(frame, _CLIENT, tag=m.tag_of(reply.seq, m.REPLY), async_op=True)
        if rest is not None:
            self._group.send(rest, _CLIENT, tag=m.tag_of(reply.seq, m.REST), async_op=True)

    def _log_once(self, text: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            say(text)

    def _send_payload(self, request: m.BatchRequest, memory: torch.Tensor) -> None:
        if request.room:
            head = memory[: request.room]
            self._group.send(head, _CLIENT, tag=m.tag_of(request.seq, m.PAYLOAD), async_op=True)
        if memory.numel() > request.room:
            tail = memory[request.room :]
            self._group.send(tail, _CLIENT, tag=m.tag_of(request.seq, m.TAIL), async_op=True)
