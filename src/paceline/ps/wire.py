"""A worker's end of the line to one server: frames and tensors go out, frames and tensors come in.

Nothing here knows what is asked, or what to do when the server is gone: PeerError says that it is.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from paceline.cluster.member import Membership
from paceline.collectives.fabric import Fabric
from paceline.ps import messages as m
from paceline.ps.line_group import SERVER, form_line
from paceline.telemetry.trace import tracer
from paceline.work import Work

Into = Callable[[m.Reply], Sequence[torch.Tensor]]


class Incoming:
    """A reply that is waited for, and the memory that its frame lands in."""

    __slots__ = ("frame", "seq", "work")

    def __init__(self, seq: int, frame: np.ndarray, work: Work[int]) -> None:
        self.seq, self.frame, self.work = seq, frame, work

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come: nothing more has to be received from the server."""
        if not self.work.done() or self.work.error() is not None or m.rest_bytes(self.frame):
            return False
        return not m.read_reply(self.frame, None).delivers


class Wire:
    """The line to one server. Made while the server makes its `Line` for this worker."""

    def __init__(self, fabric: Fabric, membership: Membership, partition: int, server: int) -> None:
        self._fabric = fabric
        self.member = membership.member(server)
        self.is_local = membership.member(fabric.rank).host_id == self.member.host_id
        self.group = form_line(fabric, membership, partition, fabric.rank, server)

    def locate(self, tensor: torch.Tensor) -> m.Where | None:
        """Say where a tensor in engine memory lies; None: the server is on another host."""
        if not self.is_local:
            return None
        size = tensor.numel() * tensor.element_size()
        where = self._fabric.engine.locate(tensor.data_ptr(), size)
        return m.Where(self._fabric.rank, *where)

    def expect(self, seq: int) -> Incoming:
        """Get ready for the reply to a request."""
        frame = np.empty(m.FRAME_BYTES, dtype=np.uint8)
        work = self.group.recv(frame, SERVER, tag=m.reply_tag(seq), async_op=True, background=False)
        assert isinstance(work, Work)
        return Incoming(seq, frame, work)

    def send(self, request: m.AnyRequest, payload: Sequence[torch.Tensor]) -> list[Work[None]]:
        """Send a request, and the tensors that follow it; return the Works of those."""
        if tracer.on:
            request = msgspec.structs.replace(request, step=tracer.step)
        frame, rest = m.to_frames(request)
        self.group.send(frame, SERVER, tag=m.REQUEST, async_op=True)
        if rest is not None:
            self.group.send(rest, SERVER, tag=m.REQUEST_REST, async_op=True)
        works = []
        for number, tensor in enumerate(payload):
            tag = m.payload_tag(request.seq, number)
            work = self.group.send(tensor, SERVER, tag=tag, async_op=True)
            assert isinstance(work, Work)
            works.append(work)
        return works

    def read(self, incoming: Incoming, into: Into) -> m.Reply:
        """Take a reply whose frame is there, and the tensors that follow it. Blocks for those."""
        size, rest = m.rest_bytes(incoming.frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self.group.recv(rest, SERVER, tag=m.reply_rest_tag(incoming.seq))
        reply = m.read_reply(incoming.frame, rest)
        if reply.delivers and not reply.error:
            works = [
                self.group.recv(
                    tensor, SERVER, tag=m.delivery_tag(incoming.seq, number), async_op=True
                )
                for number, tensor in enumerate(into(reply))
            ]
            for work in works:
                assert isinstance(work, Work)
                work.wait()
        return reply

    def close(self) -> None:
        """Give up the line; whoever waits for something on it gets GenerationChanged."""
        self.group.close()
