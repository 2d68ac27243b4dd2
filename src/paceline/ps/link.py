"""A worker's line to one server: questions go out, answers come back as Work.

The line is a group of two, so that whatever happens to one worker or server concerns nobody else's
line. On one host tensors stay where they are, in engine memory, and a question says where; between
hosts they follow it. A server that is gone ends every question with ServerLost, which names what
it held.

Threads: any; questions of one line are numbered in the order in which they are asked.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from paceline import errors
from paceline.cluster.notice import FIRST_S, WaitNotice
from paceline.collectives.topology import Fabric
from paceline.ps import messages as m
from paceline.ps.line_group import SERVER, form_line
from paceline.work import Handle, Work

_LEAVE_S = 2.0
_SHOWN = 4
_ENGINE_WORDS = re.compile(r"^rank \d+( \(pid \d+\))? | during .*", re.DOTALL)


class ServerLink:
    """Asks one server. Made on the worker while the server makes its `Line` for this worker."""

    def __init__(self, fabric: Fabric, server: int, index: int) -> None:
        self.rank, self.index = server, index
        self._fabric = fabric
        self._mu = threading.Lock()
        self._seq = 0  # guarded by: _mu
        here, there = (fabric.membership.member(rank) for rank in (fabric.rank, server))
        self.is_local = here.host_id == there.host_id
        self._where = there.where
        self._group = form_line(fabric, fabric.membership, index, fabric.rank, server)
        self._peer = SERVER
        self.holds: list[str] = []  # labels of the shards there, for messages

    def locate(self, tensor: torch.Tensor) -> m.Where | None:
        """Say where a tensor in engine memory lies; None: the server is on another host."""
        if not self.is_local:
            return None
        size = tensor.numel() * tensor.element_size()
        where = self._fabric.engine.locate(tensor.data_ptr(), size)
        return m.Where(self._fabric.rank, *where)

    def ask(
        self,
        make: Callable[[int], m.AnyRequest],
        payload: Sequence[torch.Tensor] = (),
        into: Callable[[m.Reply], Sequence[torch.Tensor]] = lambda _: (),
    ) -> Work[m.Reply]:
        """Send a request and return the Work of its reply.

        `payload` follows the request; `into(reply)` says where tensors land that follow the reply.
        """
        with self._mu:
            self._seq += 1
            seq = self._seq
            frame = np.empty(m.FRAME_BYTES, dtype=np.uint8)
            receive = self._try(
                lambda: self._group.recv(
                    frame, self._peer, tag=m.reply_tag(seq), async_op=True, background=False
                )
            )
            request = make(seq)
            self._send(request, seq, payload)
        assert isinstance(receive, Work)
        answer = _Answer(receive.handle, self._lost, self._notice(request))
        return Work(answer, lambda: self._finish(seq, frame, into), (receive, frame))

    def _notice(self, request: m.AnyRequest) -> str:
        if isinstance(request, m.Follow):
            return ""
        asked = type(request).__name__.lower()
        return (
            f"rank {self._fabric.rank} waits for server {self.index} to answer its {asked}; other"
            " workers may be behind (the server tells the launcher who)"
        )

    def tell(
        self, make: Callable[[int], m.AnyRequest], payload: Sequence[torch.Tensor] = ()
    ) -> list[Work[None]]:
        """Send a request that has no reply; return the Works of its payload, which is read until
        they are done."""
        with self._mu:
            self._seq += 1
            return self._send(make(self._seq), self._seq, payload)

    def leave(self) -> None:
        """Tell the server that nothing more will come, and give up the line."""
        with suppress(errors.PacelineError):  # gone or busy: it will see this process leave
            self.ask(m.Leave).wait(_LEAVE_S)
        self._group.close()

    def _send(
        self, request: m.AnyRequest, seq: int, payload: Sequence[torch.Tensor]
    ) -> list[Work[None]]:
        frame, rest = m.to_frames(request)
        self._try(lambda: self._group.send(frame, self._peer, tag=m.REQUEST, async_op=True))
        if rest is not None:
            self._try(lambda: self._group.send(rest, self._peer, tag=m.REQUEST_REST, async_op=True))
        works = []
        for number, tensor in enumerate(payload):
            tag = m.payload_tag(seq, number)
            work = self._try(
                lambda tensor=tensor, tag=tag: self._group.send(  # type: ignore[misc]
                    tensor, self._peer, tag=tag, async_op=True
                )
            )
            assert isinstance(work, Work)
            works.append(Work(_Answer(work.handle, self._lost), lambda: None, work))
        return works

    def _finish(
        self,
        seq: int,
        frame: np.ndarray,
        into: Callable[[m.Reply], Sequence[torch.Tensor]],
    ) -> m.Reply:
        size, rest = m.rest_bytes(frame), None
        if size:
            rest = np.empty(size, dtype=np.uint8)
            self._try(lambda: self._group.recv(rest, self._peer, tag=m.reply_rest_tag(seq)))
        reply = m.read_reply(frame, rest)
        if reply.error:
            raise errors.named(reply.error, reply.text)
        if reply.delivers:
            self._receive_all(seq, into(reply))
        return reply

    def _receive_all(self, seq: int, into: Sequence[torch.Tensor]) -> None:
        works = [
            self._group.recv(tensor, self._peer, tag=m.delivery_tag(seq, number), async_op=True)
            for number, tensor in enumerate(into)
        ]
        for work in works:
            assert isinstance(work, Work)
            self._try(work.wait)

    def _try(self, operation: Callable[[], object]) -> object:
        try:
            return operation()
        except errors.PeerError as error:
            raise self._lost(error) from error

    def _lost(self, error: errors.PacelineError) -> errors.PacelineError:
        """Say in words of servers and shards what the engine says about receives and tags."""
        if not isinstance(error, errors.PeerLost | errors.PeerTimeout):
            return error
        shown = ", ".join(self.holds[:_SHOWN]) or "no shard"
        if len(self.holds) > _SHOWN:
            shown += f" and {len(self.holds) - _SHOWN} more"
        what = _ENGINE_WORDS.sub("", str(error))
        advice = "its own output says why"
        if isinstance(error, errors.PeerTimeout):
            advice = "it is stopped, or its machine is (PACELINE_LIVENESS_S is the limit)"
        return errors.ServerLost(
            f"rank {self._fabric.rank}: server {self.index} (rank {self.rank}, {self._where})"
            f" {what}; {advice}. It held {shown}, and nobody else has those values: start again"
            " from a checkpoint",
            rank=self.rank,
        )


class _Answer:
    """A reply under way, with errors in the words of the line; a long wait says so."""

    def __init__(
        self,
        handle: Handle,
        lost: Callable[[errors.PacelineError], errors.PacelineError],
        notice: str = "",
    ) -> None:
        self._handle = handle
        self._lost = lost
        self._notice = notice  # empty: it is normal to wait long

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
        notice = WaitNotice(self._notice)
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


def connect(fabric: Fabric) -> tuple[ServerLink, ...]:
    """Make this worker's lines to all servers. Every server does the same for all workers."""
    servers = fabric.membership.servers
    return tuple(ServerLink(fabric, server, index) for index, server in enumerate(servers))
