"""One process's connection to the coordinator: heartbeats, requests, reconnecting.

Without `is_lasting` the connection ends when it breaks. A lasting connection reconnects by itself,
for ever: the coordinator's address outlives its process, because the launcher holds the listening
socket. After reconnecting it sends its greeting (`greet`: identity and known state) and repeats
unanswered requests; the coordinator recognises them by their ids.

Threads: everything runs in the loop of the thread that called `open`; `is_attached`,
`unreachable_s` and `ended` may be read anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from paceline import errors
from paceline.control import messages as m
from paceline.control.client.requests import ANSWER_S
from paceline.control.transport.acceptor import introduce_control
from paceline.control.transport.auth import CallerHandshake
from paceline.control.transport.channel import Channel
from paceline.control.transport.loop_thread import LoopThread
from paceline.control.transport.sockets import connect_tcp, keep_trying
from paceline.control.wait_notice import WaitNotice
from paceline.errors import PeerLost, PeerTimeout

_ATTEMPT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_SLICE_S = 0.5
_FAREWELL_S = 1.5

M = TypeVar("M")

log = logging.getLogger("paceline.control")


class Identity(NamedTuple):
    """Which process of which job connects, and the secret that proves it."""

    secret: bytes
    job_id: str
    role: str
    rank: int


class CoordinatorConnection(Generic[M]):
    """The connection of one process to the coordinator; M: the messages that it receives."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        decoder: msgspec.msgpack.Decoder[M],
        *,
        heartbeat_s: float,
        vanished_s: float,
        is_lasting: bool,
        name: str,
    ) -> None:
        self.address, self.name, self._identity = address, name, identity
        self.on_message: Callable[[M], None] = lambda _: None
        self.greet: Callable[[], Sequence[Any]] = tuple  # the first messages after reconnecting
        self.local_address = ""
        self.ended: errors.PacelineError | None = None  # why no request is possible any more
        self._decoder, self._heartbeat_s, self._vanished_s = decoder, heartbeat_s, vanished_s
        self._is_lasting = is_lasting
        self._channel: Channel[M]
        self._away_s: float | None = None  # since when the connection is broken
        self._tasks: list[asyncio.Task[None]] = []
        # Ids begin anywhere: those of an earlier process with the same rank must not be repeated.
        self._ids = itertools.count(secrets.randbits(48) << 12)
        self._asked: dict[int, tuple[Any, asyncio.Future[m.Answer]]] = {}  # not answered yet

    @property
    def is_attached(self) -> bool:
        return self._away_s is None and self.ended is None

    @property
    def unreachable_s(self) -> float:
        """For how long the coordinator has been unreachable; 0 if it is not."""
        away_s = self._away_s
        return 0.0 if away_s is None else time.monotonic() - away_s

    def next_id(self) -> int:
        return next(self._ids)

    async def open(self, timeout_s: float) -> None:
        """Connect and authenticate; raises ConnectError, AuthError or VersionMismatch."""
        notice = WaitNotice(f"{self.name} waits for the coordinator at {self.address}")

        async def attempt() -> Channel[M]:
            notice.check()
            return await self._connect()

        what = f"{self.name}: coordinator {self.address}"
        self._channel = await keep_trying(attempt, what=what, timeout_s=timeout_s)
        self._tasks = [asyncio.ensure_future(run()) for run in (self._listen, self._beat)]

    def send(self, message: Any) -> None:
        """Send a message that has no answer; dropped while the coordinator is away."""
        if self.is_attached:
            try:
                self._channel.send(message)
            except PeerLost as error:  # it does not read: `_listen` sees the closed channel
                log.warning("%s: coordinator %s: %s", self.name, self.address, error)

    async def ask(self, make: Callable[[int], Any], timeout_s: float) -> m.Answer:
        """Send a request and return its answer, also from a restarted coordinator; raises the
        error that the coordinator answers with."""
        if self.ended is not None:
            raise self.ended
        request_id = self.next_id()
        message = make(request_id)
        answer: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = (message, answer)
        try:
            self.send(message)
            reply = await self._answered(answer, timeout_s)
        finally:
            self._asked.pop(request_id, None)
        if isinstance(reply, m.Failure):
            raise errors.named(reply.error, reply.text)
        return reply

    async def leave(self, farewell: Any) -> None:
        """Send a last message and close; waits a moment for a coordinator that is away."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while self._is_lasting and not self.is_attached and time.monotonic() < deadline_s:
            await asyncio.sleep(_FIRST_PAUSE_S)
        self.send(farewell)
        for task in self._tasks:
            task.cancel()
        self.ended = self._lost("this member has left the job")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.finish()
        self.give_up(self.ended)

    def drop(self) -> None:
        """Break the connection without a farewell, as the death of a process does."""
        self._channel.close()

    def give_up(self, error: errors.PacelineError) -> None:
        """Close for good; pending requests raise this error."""
        self.ended = error
        self._channel.close()
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)

    async def _connect(self) -> Channel[M]:
        secret, job_id, role, rank = self._identity
        handshake = CallerHandshake(
            secret,
            job_id=job_id,
            listener=m.COORDINATOR,
            role=role,
            rank=rank,
            purpose="control",
        )
        sock = await connect_tcp(self.address)
        # So a host that vanished is noticed by the heartbeats that it no longer acknowledges.
        limit_ms = int(self._vanished_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        self.local_address = sock.getsockname()[0]
        what = f"{self.name}: coordinator {self.address}"
        wire, session = await introduce_control(sock, handshake, what=what)
        return await Channel.over(wire, session, self._decoder)

    async def _listen(self) -> None:
        try:
            while True:
                why = await self._read()
                if not self._is_lasting or self.ended is not None:
                    break
                self._away_s = time.monotonic()
                log.debug("%s: coordinator %s: %s; trying again", self.name, self.address, why)
                await self._reconnect()
            if self.ended is None:
                self.give_up(self._lost(why))
        finally:
            if self.ended is None:  # whatever went wrong, no request may wait for ever
                self.give_up(self._lost("its messages are no longer read"))

    async def _read(self) -> str:
        """Handle messages until the connection ends; return why it did."""
        try:
            while True:
                self._take(await self._channel.receive())
        except (EOFError, OSError):
            return "it closed the connection or ended; membership and links stay usable"
        except errors.PacelineError as error:
            return f"it sent something that cannot be trusted: {error}"

    def _take(self, message: M) -> None:
        if isinstance(message, m.Answer) and message.id in self._asked:
            answer = self._asked[message.id][1]
            if not answer.done():
                answer.set_result(message)
            return
        try:
            self.on_message(message)
        except Exception:  # a callback's bug must not cost us the connection
            log.exception("%s: a callback failed for %r", self.name, message)

    async def _reconnect(self) -> None:
        """Connect again, however long it takes; then greet and repeat unanswered requests."""
        self._channel.close()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                self._channel = await asyncio.wait_for(self._connect(), _ATTEMPT_S)
                break
            except (OSError, asyncio.TimeoutError, errors.PacelineError) as error:
                log.debug("%s: coordinator %s: %r", self.name, self.address, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        self._away_s = None
        unanswered = [message for message, answer in self._asked.values() if not answer.done()]
        for message in [*self.greet(), *unanswered]:
            self.send(message)

    async def _beat(self) -> None:
        while self.ended is None:
            self.send(m.Heartbeat())
            await asyncio.sleep(self._heartbeat_s)

    async def _answered(self, answer: asyncio.Future[m.Answer], timeout_s: float) -> m.Answer:
        deadline_s = time.monotonic() + timeout_s
        notice: WaitNotice | None = None
        while not answer.done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._unanswered(timeout_s)
            await asyncio.wait({answer}, timeout=min(left_s, _SLICE_S))
            if self.is_attached:
                notice = None
            elif notice is None:
                text = f"{self.name} waits for the coordinator at {self.address} to come back"
                notice = WaitNotice(text)
            else:
                notice.check()
        return answer.result()

    def _unanswered(self, timeout_s: float) -> PeerTimeout:
        state = (
            "its process may be stopped"
            if self.is_attached
            else f"it has been away for {self.unreachable_s:.0f} s"
        )
        return PeerTimeout(
            f"{self.name}: coordinator {self.address} has not answered for {timeout_s:g} s; {state}"
        )

    def _lost(self, why: str) -> PeerLost:
        return PeerLost(f"{self.name}: coordinator {self.address}: {why}")


class ControlClient(Generic[M]):
    """A connection to the coordinator in a thread of its own: the base of Agent and Operator."""

    def __init__(self, thread: LoopThread, connection: CoordinatorConnection[M]) -> None:
        self.thread, self._connection = thread, connection

    @property
    def is_attached(self) -> bool:
        """Whether the coordinator is connected right now."""
        return self._connection.is_attached

    @property
    def unreachable_s(self) -> float:
        """For how long the coordinator has been unreachable; 0 if it is not."""
        return self._connection.unreachable_s

    def _open(self, timeout_s: float) -> None:
        try:
            self.thread.call(self._connection.open(timeout_s))
        except BaseException:
            self.thread.stop()
            raise

    def _ask(self, make: Callable[[int], Any], timeout_s: float = ANSWER_S) -> m.Answer:
        """Send the request that `make` makes with an id; return its answer or raise its error."""
        if self._connection.ended is not None:
            raise self._connection.ended
        return self.thread.call(self._connection.ask(make, timeout_s))

    def _send(self, message: Any) -> None:
        self.thread.post(self._connection.send, message)

    def _leave(self, farewell: m.Leave) -> None:
        """Send a last message and close; no effect if the connection has ended."""
        if self._connection.ended is None and self.thread.is_running:
            self.thread.call(self._connection.leave(farewell))
