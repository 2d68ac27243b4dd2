"""A worker's line to the server of one partition: questions go out, answers come back as Work.

The line is a group of two, so that whatever happens to one worker or server concerns nobody else's
line. On one host tensors stay where they are, in engine memory, and a question says where; between
hosts they follow it. A server that is gone ends every question with ServerLost, which names what
it held; where partitions have several holders, failover_link.py goes on with the next one.

`Wire` is the line itself: it knows neither what is asked nor what to do when the server is gone.

Threads: any; questions of one line are numbered in the order in which they are asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import torch

from paceline import _core, errors
from paceline.comm.fabric import Fabric
from paceline.control.member import Member, Membership
from paceline.control.wait_notice import FIRST_S, WaitNotice
from paceline.observe.telemetry.trace import tracer
from paceline.ps import connection as line
from paceline.ps import messages as m
from paceline.runtime.work import Handle, Work

LEAVE_S = 2.0
ANSWER = "a request"  # what one waits in who waits for a server
_SHOWN = 4

Make = Callable[[int], m.AnyRequest]
Payload = Callable[[], Sequence[torch.Tensor]]
Into = Callable[[m.Reply], Sequence[torch.Tensor]]


def no_payload() -> Sequence[torch.Tensor]:
    """What follows most requests."""
    return ()


def no_landing(_: m.Reply) -> Sequence[torch.Tensor]:
    """Where the tensors land that follow most replies."""
    return ()


# -- the line ---------------------------------------------------------------------------------


class Incoming:
    """A reply that is waited for, and the memory that its frame lands in."""

    __slots__ = ("frame", "seq", "work")

    def __init__(self, seq: int, frame: np.ndarray, work: _core.Work) -> None:
        self.seq, self.frame, self.work = seq, frame, work

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come: nothing more has to be received from the server."""
        if not self.work.done() or self.work.error() is not None or line.rest_bytes(self.frame):
            return False
        return not line.read_reply(self.frame, None).delivers


class Wire:
    """The line to one server. Made while the server makes its `Line` for this worker."""

    def __init__(self, fabric: Fabric, membership: Membership, partition: int, server: int) -> None:
        self.member = membership.member(server)
        self.is_local = membership.member(fabric.rank).host_id == self.member.host_id
        self.pair = line.form_line(fabric, membership, partition, fabric.rank, server)

    def expect(self, seq: int) -> Incoming:
        """Get ready for the reply to a request."""
        frame = np.empty(line.FRAME_BYTES, dtype=np.uint8)
        return Incoming(seq, frame, self.pair.receive_frame(frame, line.reply_tag(seq)))

    def send(self, request: m.AnyRequest, payload: Sequence[torch.Tensor]) -> list[_core.Work]:
        """Send a request, and the tensors that follow it; return the works of those."""
        if tracer.on:
            request = msgspec.structs.replace(request, step=tracer.step)
        self.pair.tell(request, line.REQUEST, line.REQUEST_REST)
        return [
            self.pair.send(tensor, line.payload_tag(request.seq, number))
            for number, tensor in enumerate(payload)
        ]

    def read(self, incoming: Incoming, into: Into) -> m.Reply:
        """Take a reply whose frame is there, and the tensors that follow it. Blocks for those."""
        size, rest = line.rest_bytes(incoming.frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self.pair.receive_frame(rest, line.reply_rest_tag(incoming.seq)).wait()
        reply = line.read_reply(incoming.frame, rest)
        if reply.delivers and not reply.error:
            works = [
                self.pair.receive(tensor, line.delivery_tag(incoming.seq, number))
                for number, tensor in enumerate(into(reply))
            ]
            for work in works:
                work.wait()
        return reply

    def close(self) -> None:
        """Give up the line; whoever waits for something on it gets GenerationChanged."""
        self.pair.close()


# -- asking -----------------------------------------------------------------------------------


class ServerLink:
    """Asks one server. In a job whose servers hold one partition each, and do not change."""

    def __init__(self, fabric: Fabric, server: int, index: int) -> None:
        self.index = index  # of the partition
        self.holds: list[str] = []  # labels of the shards there, for messages
        self.worker = fabric.rank  # this process's
        self._engine = fabric.engine
        self._mu = threading.Lock()
        self._seq = 0  # guarded by: _mu
        self._wire = Wire(fabric, fabric.membership, index, server)

    @property
    def rank(self) -> int:
        """The server's."""
        return self._wire.member.rank

    @property
    def number(self) -> int:
        """The server's, among servers."""
        return self._wire.member.number

    @property
    def is_local(self) -> bool:
        """Whether the server is on this host, and sees this worker's engine memory."""
        return self._wire.is_local

    @property
    def uses_engine_memory(self) -> bool:
        """Whether tensors have to lie in engine memory."""
        return self._wire.is_local

    def locate(self, tensor: torch.Tensor) -> m.Where | None:
        """Return where a tensor in engine memory lies; None: the server is on another host."""
        if not self.is_local:
            return None
        where = self._engine.locate(tensor.data_ptr(), tensor.nbytes)
        return m.Where(self.worker, *where)

    def hand_over(self, tensor: torch.Tensor) -> m.Where | None:
        """The same, of a tensor that the server is going to read there: it counts as sent."""
        where = self.locate(tensor)
        if where is not None:
            self._engine.count_sent(tensor.nbytes)
        return where

    def ask(
        self, make: Make, payload: Payload = no_payload, into: Into = no_landing
    ) -> Work[m.Reply]:
        """Send a request and return the Work of its reply.

        `make(number)` returns the request, `payload()`, called next, the tensors that follow it;
        `into(reply)` says where tensors land that follow the reply.
        """
        with self._mu:
            self._seq += 1
            request, tensors = make(self._seq), payload()
            try:
                incoming = self._wire.expect(self._seq)
                self._wire.send(request, tensors)
            except errors.PeerError as error:
                raise self._lost(error) from error
        answer = _Answer(incoming.work, self._lost, notice(self, request), self.rank)
        return Work(answer, lambda: self._finish(incoming, into), incoming)

    def tell(self, make: Make, payload: Payload = no_payload) -> list[Work[None]]:
        """Send a request that has no reply; return the Works of its payload, which is read until
        they are done."""
        with self._mu:
            self._seq += 1
            request, tensors = make(self._seq), payload()
            try:
                works = self._wire.send(request, tensors)
            except errors.PeerError as error:
                raise self._lost(error) from error
        return [Work(_Answer(work, self._lost), lambda: None, work) for work in works]

    def leave(self) -> None:
        """Tell the server that nothing more will come, and give up the line."""
        with suppress(errors.PacelineError):  # gone or busy: it will see this process leave
            self.ask(m.Leave).wait(LEAVE_S)
        self._wire.close()

    @property
    def label(self) -> str:
        """Name the server that answers, for people."""
        return f"server {self._wire.member.number}"

    def _finish(self, incoming: Incoming, into: Into) -> m.Reply:
        try:
            return require_success(self._wire.read(incoming, into))
        except errors.PeerError as error:
            raise self._lost(error) from error

    def _lost(self, error: errors.PacelineError) -> errors.PacelineError:
        if not isinstance(error, errors.PeerLost | errors.PeerTimeout):
            return error
        return lost(self.worker, self._wire.member, error, self.holds)


def require_success(reply: m.Reply) -> m.Reply:
    """Return a reply; raise the error that it tells."""
    if reply.error:
        raise errors.named(reply.error, reply.text)
    return reply


def notice(link: ServerLink, request: m.AnyRequest) -> str:
    """Return what a worker waits for, in words; nothing if it is normal to wait long."""
    if isinstance(request, m.Follow):
        return ""
    asked = type(request).__name__.lower()
    return (
        f"rank {link.worker} waits for {link.label} to answer its {asked}; other"
        " workers may be behind (the server tells the launcher who)"
    )


def lost(
    rank: int, server: Member, error: errors.PacelineError, holds: Sequence[str]
) -> errors.ServerLost:
    """Return the loss of a server in words of servers and shards; the engine's own are its cause.

    A server that is stopped, or whose machine is, ends a wait with PeerTimeout.
    """
    what, advice = "ended or lost its connection", "its own output says why"
    if isinstance(error, errors.PeerTimeout):
        what = "has not run for longer than it may"
        advice = "it is stopped, or its machine is (PACELINE_LIVENESS_S is the limit)"
    return errors.ServerLost(
        f"rank {rank}: server {server.number} (rank {server.rank}, {server.where})"
        f" {what}; {advice}. It held {shown(holds)}, and nobody else has those values: start again"
        " from a checkpoint",
        rank=server.rank,
    )


def shown(holds: Sequence[str]) -> str:
    """Name shards, not too many."""
    text = ", ".join(holds[:_SHOWN]) or "no shard"
    return text if len(holds) <= _SHOWN else f"{text} and {len(holds) - _SHOWN} more"


class _Answer:
    """A reply under way, with errors in the words of the line; a long wait says so."""

    def __init__(
        self,
        handle: Handle,
        lost: Callable[[errors.PacelineError], errors.PacelineError],
        notice: str = "",
        server: int = -1,
    ) -> None:
        self._handle = handle
        self._lost = lost
        self._notice = notice  # empty: it is normal to wait long
        self._server = server  # whose answer it is, by rank

    def done(self) -> bool:
        return self._handle.done()

    def wait(self, timeout_s: float | None = None) -> None:
        if self._notice and timeout_s is None and not self._handle.done():
            self._wait_aloud()
        try:
            self._handle.wait(timeout_s)
        except errors.PeerError as error:
            if timeout_s is not None and not self._handle.done():
                raise  # only this wait has ended
            raise self._lost(error) from error

    def _wait_aloud(self) -> None:
        if self._has_ended_within(FIRST_S):
            return
        notice = WaitNotice(self._notice, ANSWER, [self._server], waited_s=FIRST_S)
        notice.check()
        while not self._has_ended_within(FIRST_S):
            notice.check()

    def _has_ended_within(self, seconds: float) -> bool:
        """Wait a little; an error is for whoever waits for the outcome."""
        with suppress(errors.PeerError):
            self._handle.wait(seconds)
        return self._handle.done()

    def error(self) -> Exception | None:
        error = self._handle.error()
        return self._lost(error) if isinstance(error, errors.PacelineError) else error
