"""A worker's line to the server of one partition: questions go out, answers come back as Work.

The line is a group of two, so that whatever happens to one worker or server concerns nobody else's
line. On one host tensors stay where they are, in engine memory, and a question says where; between
hosts they follow it. A server that is gone ends every question with ServerLost, which names what
it held; where partitions have several holders, lasting.py goes on with the next one.

Threads: any; questions of one line are numbered in the order in which they are asked.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from paceline import errors
from paceline.cluster.member import Member
from paceline.cluster.notice import FIRST_S, WaitNotice
from paceline.collectives.fabric import Fabric
from paceline.ps import messages as m
from paceline.ps.wire import Incoming, Into, Wire
from paceline.work import Handle, Work

LEAVE_S = 2.0
_SHOWN = 4
_ENGINE_WORDS = re.compile(r"^rank \d+( \(pid \d+\))? | during .*", re.DOTALL)

Make = Callable[[int], m.AnyRequest]
Payload = Callable[[], Sequence[torch.Tensor]]


def no_payload() -> Sequence[torch.Tensor]:
    """What follows most requests."""
    return ()


def no_landing(_: m.Reply) -> Sequence[torch.Tensor]:
    """Where the tensors land that follow most replies."""
    return ()


class ServerLink:
    """Asks one server. In a job whose servers hold one partition each, and do not change."""

    def __init__(self, fabric: Fabric, server: int, index: int) -> None:
        self.index = index  # of the partition
        self.holds: list[str] = []  # labels of the shards there, for messages
        self._fabric = fabric
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
        """Say where a tensor in engine memory lies; None: the server is on another host."""
        return self._wire.locate(tensor)

    def hand_over(self, tensor: torch.Tensor) -> m.Where | None:
        """The same, of a tensor that the server is going to read there: it counts as sent."""
        where = self.locate(tensor)
        if where is not None:
            self._fabric.engine.count_sent(tensor.nbytes)
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
        answer = _Answer(incoming.work.handle, self._lost, notice(self, request), self.rank)
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
        return [Work(_Answer(work.handle, self._lost), lambda: None, work) for work in works]

    def leave(self) -> None:
        """Tell the server that nothing more will come, and give up the line."""
        with suppress(errors.PacelineError):  # gone or busy: it will see this process leave
            self.ask(m.Leave).wait(LEAVE_S)
        self._wire.close()

    @property
    def label(self) -> str:
        """Name who answers, for people."""
        return f"server {self._wire.member.number}"

    @property
    def worker(self) -> int:
        """This worker's rank."""
        return self._fabric.rank

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


ANSWER = "a request"  # what one waits in who waits for a server


def notice(link: ServerLink, request: m.AnyRequest) -> str:
    """Say what a worker waits for; nothing if it is normal to wait long."""
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
    """Say in words of servers and shards what the engine says about receives and tags."""
    what = _ENGINE_WORDS.sub("", str(error))
    advice = "its own output says why"
    if isinstance(error, errors.PeerTimeout):
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
        notice = WaitNotice(self._notice, ANSWER, [self._server])
        while not self._handle.done():
            try:
                self._handle.wait(FIRST_S)
            except errors.PeerError:
                if self._handle.done():
                    return  # with an error, which whoever waits will get
            notice.check()

    def error(self) -> Exception | None:
        error = self._handle.error()
        return self._lost(error) if isinstance(error, errors.PacelineError) else error
