"""A worker's link to the server of one partition: it sends requests and returns replies as Work.

On one host tensors stay in engine memory, and a request names where they lie; between hosts they
follow it. Without failover, a lost server ends every request with ServerLost. In an elastic job a
link fails over (failover.py): pending requests are sent to the next server, and a thread that waits
for a reply keeps waiting. Memory that a request is read from must therefore not change until its
reply arrives; for a push without a reply, until its commit's.

Threads: any; a thread that needs the connection renews it, under the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from paceline import _core, errors
from paceline.comm.fabric import Fabric
from paceline.control.member import Member
from paceline.control.wait_notice import FIRST_S, WaitNotice
from paceline.ps import messages as m
from paceline.ps.client.failover import ControlAgent, Failover, PendingRequests, server_lost
from paceline.ps.client.payload import PayloadHandle
from paceline.ps.connection import IncomingReply, Into, ServerConnection, read_reply
from paceline.runtime.work import Work

_LEAVE_S = 2.0
_SLICE_S = 0.05  # how often a thread that waits looks for a failover
_MANY = 512  # pending requests; servers remember the newest 1024 replies


Make = Callable[[int], m.AnyRequest]
Payload = Callable[[], Sequence[torch.Tensor]]
See = Callable[[m.Reply], None]  # makes visible what a reply names; PeerError: it is gone


def no_tensors(*_: object) -> Sequence[torch.Tensor]:
    """Return the tensors that follow most requests and replies: none."""
    return ()


def nothing(_: m.Reply) -> None:
    """Do nothing: most replies name nothing that has to be made visible."""


class _Request:
    """A request: what is needed to send it again, and the handle of its reply."""

    def __init__(
        self,
        link: ServerLink,
        make: Make,
        payload: Payload,
        into: Into = no_tensors,
        see: See = nothing,
        *,
        has_reply: bool = True,
    ) -> None:
        self.make, self.payload, self.into, self.has_reply = make, payload, into, has_reply
        self.see = see
        self.seq = 0
        self.kind: type[m.AnyRequest] | None = None
        self.connection: ServerConnection | None = None  # that the reply is expected on
        self.incoming: IncomingReply | None = None
        self.reply: m.Reply | None = None
        self._link = link
        self._error: errors.PacelineError | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the reply has arrived, or its frame has."""
        if self.reply is not None or self.incoming is None:
            return self.reply is not None
        return self.incoming.work.done() and self.incoming.work.error() is None

    def done(self) -> bool:
        if self._error is None and not self.has_arrived:
            try:
                self._link.check(self)
            except errors.PacelineError as error:
                self._error = error
        return self._error is not None or self.has_arrived

    def wait(self, timeout_s: float | None = None) -> None:
        if self.reply is None:
            self._link.wait(self, timeout_s)

    def error(self) -> Exception | None:
        self.done()
        return self._error

    def read(self) -> m.Reply:
        """Return the reply, once it was waited for; raise the error that it carries."""
        assert self.reply is not None, "it was not waited for"
        if self.reply.error:
            raise errors.named(self.reply.error, self.reply.text)
        return self.reply


class ServerLink:
    """Sends requests to the server that answers for one partition."""

    _is_yielding = False  # the main thread is inside some link's on_wait, and may ask from there

    def __init__(
        self,
        fabric: Fabric,
        index: int,
        agent: ControlAgent | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """`agent`: fail over. `on_wait` is called in long waits on the main thread: other workers
        may need this one meanwhile."""
        self.index = index  # of the partition
        self.holds: list[str] = []  # labels of the shards there, for messages
        self.worker, self.on_wait = fabric.rank, on_wait
        self._fabric, self._engine = fabric, fabric.engine
        self._lock = threading.RLock()  # guards what follows
        self._seq = 0  # without failover
        self._pending: PendingRequests[_Request] = PendingRequests()  # with failover
        self._has_left = False
        self._failover: Failover | None = None
        self._fixed: ServerConnection | None = None
        if agent is not None:
            self._failover = Failover(fabric, index, agent, ServerConnection)
        else:
            now = fabric.membership
            self._fixed = ServerConnection(fabric, now, index, now.holders[index][0])

    # -- the server ---------------------------------------------------------------------------

    @property
    def server(self) -> Member:
        """The server that answers; ServerLost: there is none any more."""
        if self._fixed is not None:
            return self._fixed.member
        assert self._failover is not None
        with self._lock:
            server = self._failover.server
            if server is None:
                raise self._failover.loss(self.holds)
            return server

    @property
    def _connection(self) -> ServerConnection | None:
        return self._fixed if self._failover is None else self._failover.connection

    @property
    def is_local(self) -> bool:
        """Whether the server is on this host, and sees this worker's engine memory."""
        if self._fixed is not None:
            return self._fixed.is_local
        return self.server.host_id == self._fabric.me.host_id

    @property
    def uses_engine_memory(self) -> bool:
        """Whether tensors have to lie in engine memory; the next server may be on this host."""
        return self._failover is not None or self.is_local

    def locate(self, tensor: torch.Tensor) -> m.Where | None:
        """Return where a tensor in engine memory lies; None: the server is on another host."""
        if not self.is_local:
            return None
        where = self._engine.locate(tensor.data_ptr(), tensor.nbytes)
        return m.Where(self.worker, *where)

    def hand_over(self, tensor: torch.Tensor) -> m.Where | None:
        """Return where a tensor lies that the server is going to read there: it counts as sent."""
        where = self.locate(tensor)
        if where is not None:
            self._engine.count_sent(tensor.nbytes)
        return where

    # -- sending ------------------------------------------------------------------------------

    def ask(
        self,
        make: Make,
        payload: Payload = no_tensors,
        into: Into = no_tensors,
        see: See = nothing,
    ) -> Work[m.Reply]:
        """Send a request and return the Work of its reply.

        `make(number)` returns the request, `payload()`, called next, the tensors that follow it;
        `into(reply)` returns where tensors land that follow the reply; `see(reply)` makes visible
        what it names.
        """
        request = _Request(self, make, payload, into, see)
        with self._lock:
            self._number(request)
            self._send(request)
        return Work(request, request.read, request)

    def tell(self, make: Make, payload: Payload = no_tensors) -> list[Work[None]]:
        """Send a request without a reply; return the Works of its payload, which is read until they
        are done. With failover there are none: it is needed until a later one is answered."""
        request = _Request(self, make, payload, has_reply=False)
        with self._lock:
            self._number(request)
            works = self._send(request)
        if self._failover is not None:
            return []
        return [Work(PayloadHandle(work, self._lost), lambda: None, work) for work in works]

    def leave(self) -> None:
        """Tell the server that nothing more will come, and close the connection."""
        with self._lock:
            is_connected, self._has_left = self._connection is not None, True
        with suppress(errors.PacelineError):  # lost or busy: it will see this process leave
            if is_connected:
                self.ask(m.Leave).wait(_LEAVE_S)
        with self._lock:
            if self._failover is not None:
                self._failover.drop()
            elif self._fixed is not None:
                self._fixed.close()

    def _number(self, request: _Request) -> None:
        """Give a request its number, once the connection is the right one."""
        if self._failover is None:
            self._seq += 1
            request.seq = self._seq
        else:
            if len(self._pending) > _MANY:
                self._take_complete_replies()
            self._renew()
            request.seq = self._pending.add(request, has_reply=request.has_reply).seq

    def _send(self, request: _Request) -> Sequence[_core.Work]:
        """Send a request; if the connection is broken, it is sent again over the next one."""
        connection = self._connection
        if connection is None:
            return ()
        try:
            message, tensors = request.make(request.seq), request.payload()
        except errors.PacelineError as error:
            self._pending.withdraw(request.seq)
            if self._failover is None or not request.has_reply:
                raise
            request.reply = m.Reply(request.seq, error=type(error).__name__, text=str(error))
            return ()
        request.kind = type(message)
        try:
            if request.has_reply:
                request.connection = connection
                request.incoming = connection.expect(request.seq)
            return connection.send(message, tensors)
        except errors.PeerError as error:
            self._on_broken(connection, error)
            return ()

    def _on_broken(self, connection: ServerConnection, error: errors.PeerError) -> None:
        if self._failover is None:
            raise self._lost(error) from error
        with self._lock:
            self._failover.on_broken(connection, error)

    def _lost(self, error: errors.PacelineError) -> errors.PacelineError:
        return server_lost(self.worker, self.server, error, self.holds)

    def _renew(self) -> None:
        """Fail over if there is another primary, and send it what is pending."""
        if self._failover is None or self._has_left:
            return
        if self._failover.renew(self.holds):
            for pending in self._pending:
                incoming = pending.content.incoming
                if incoming is None or not incoming.is_complete:
                    self._send(pending.content)

    def _take_complete_replies(self) -> None:
        """Read replies that have arrived: servers remember a limited number of them."""
        for pending in self._pending:
            incoming = pending.content.incoming
            if incoming is not None and incoming.is_complete:
                pending.content.reply = read_reply(incoming.frame, None)
                self._pending.answered(pending.seq)

    # -- waiting ------------------------------------------------------------------------------

    def check(self, request: _Request) -> None:
        """Fail over if another server answers by now; raise if none ever will. Does not wait."""
        with self._lock:
            self._renew()
        error = request.incoming.work.error() if request.incoming is not None else None
        if self._failover is None and isinstance(error, errors.PacelineError):
            raise self._lost(error) from error

    def wait(self, request: _Request, timeout_s: float | None) -> None:
        """Wait for a reply, from whichever server gives it in the end."""
        for slice_s in self._slices(request, timeout_s):
            with self._lock:
                self._renew()
                connection, incoming = request.connection, request.incoming
                is_current = connection is not None and connection is self._connection
            if request.reply is not None:  # another thread has read it
                return
            if is_current or request.has_arrived:
                assert connection is not None and incoming is not None
                has_begun = self._has_begun(connection, incoming, slice_s)
                if has_begun and self._read(request, connection, incoming):
                    return
            else:
                assert self._failover is not None
                self._failover.wait_for_change(slice_s, has_left=self._has_left)

    def _has_begun(
        self, connection: ServerConnection, incoming: IncomingReply, slice_s: float
    ) -> bool:
        """Wait a little for the first frame of a reply."""
        with suppress(errors.PeerError):
            incoming.work.wait(slice_s)
        if not incoming.work.done():
            return False
        error = incoming.work.error()
        if isinstance(error, errors.PeerError):
            self._on_broken(connection, error)
        elif error is not None:
            raise error
        return error is None

    def _read(
        self, request: _Request, connection: ServerConnection, incoming: IncomingReply
    ) -> bool:
        """Read a reply to its end; false: its connection broke meanwhile."""
        try:
            reply = connection.read(incoming, request.into)
            if not reply.error:
                request.see(reply)
        except errors.PeerError as error:
            with self._lock:
                if request.incoming is incoming:
                    request.incoming = None  # it has to be sent again
                self._on_broken(connection, error)
            return False
        with self._lock:
            request.reply = reply
            if self._failover is not None:
                self._pending.answered(request.seq)
        return True

    def _slices(self, request: _Request, timeout_s: float | None) -> Iterator[float]:
        """Yield how long to wait at a time; print notices and look for a failover in between."""
        slice_s = FIRST_S if self._failover is None else _SLICE_S
        started_s = time.monotonic()
        left_s = slice_s if timeout_s is None else timeout_s
        yield min(left_s, slice_s)
        slow = WaitNotice(self._slow_text(request), "a request", waited_s=slice_s)
        text = f"rank {self.worker} waits for a server to take over partition {self.index}"
        alone = WaitNotice(text, waited_s=slice_s)
        while True:
            if timeout_s is not None:
                left_s = timeout_s - (time.monotonic() - started_s)
                if left_s <= 0:
                    raise errors.PeerTimeout(
                        f"rank {self.worker}: no reply about partition {self.index} within"
                        f" {timeout_s:g} s; it may still arrive"
                    )
            if self._failover is not None:
                with self._lock:
                    self._failover.look_for_help()
            connection = self._connection
            slow.ranks = (connection.member.rank,) if connection is not None else ()
            if connection is None:
                alone.check()
            elif request.kind is not m.Follow and timeout_s is None:  # a Follow may take long
                slow.check()
            self._yield_main_thread()
            yield min(left_s, slice_s)

    def _slow_text(self, request: _Request) -> str:
        kind = "request" if request.kind is None else request.kind.__name__.lower()
        member = None if self._connection is None else self._connection.member
        server = "its server" if member is None else f"server {member.number}"
        partition = "" if self._failover is None else f" (partition {self.index})"
        return (
            f"rank {self.worker} waits for {server}{partition} to answer its {kind}; other workers"
            " may be slower (the launcher prints which)"
        )

    def _yield_main_thread(self) -> None:
        """Let the main thread do other work that is needed while it waits."""
        is_main = threading.current_thread() is threading.main_thread()
        if self.on_wait is None or not is_main or ServerLink._is_yielding:
            return
        ServerLink._is_yielding = True
        try:
            self.on_wait()
        finally:
            ServerLink._is_yielding = False
