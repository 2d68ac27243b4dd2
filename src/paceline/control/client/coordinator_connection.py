"""One process's connection to the coordinator: heartbeats, requests, and how it comes back.

Without `is_lasting` the end of the connection is the end of the contact. A lasting contact connects
again by itself, for ever: the coordinator's address outlives its process, because the launcher
holds the socket on which it listens. Then it greets (`greet`: who we are, and what we know), and
asks again what was not answered; the coordinator recognises requests by their ids.

Threads: everything runs in the loop of the thread that called `open`; `is_attached`,
`unreachable_s` and `gone` may be read anywhere.
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
from paceline.control.transport import messages as m
from paceline.control.transport.acceptor import introduce
from paceline.control.transport.auth import CallerHandshake
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import connect_tcp, keep_trying
from paceline.control.wait_notice import WaitNotice
from paceline.errors import PeerLost, PeerTimeout

ATTEMPT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_SLICE_S = 0.5
_FAREWELL_S = 1.5

M = TypeVar("M")

log = logging.getLogger("paceline.control")


class Identity(NamedTuple):
    """Who calls, and with what it proves it."""

    secret: bytes
    job_id: str
    role: str
    rank: int


class Contact(Generic[M]):
    """The way to the coordinator for one process; M: what it may hear."""

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
        self.greet: Callable[[], Sequence[Any]] = tuple  # what is said first when we are back
        self.local_address = ""
        self.gone: errors.PacelineError | None = None  # why nobody can be asked any more
        self._decoder, self._heartbeat_s, self._vanished_s = decoder, heartbeat_s, vanished_s
        self._is_lasting = is_lasting
        self._channel: Channel[M]
        self._away_s: float | None = None  # since when the connection is broken
        self._tasks: list[asyncio.Task[None]] = []
        # Ids begin anywhere: those of an earlier process in the same place must not come again.
        self._ids = itertools.count(secrets.randbits(48) << 12)
        self._asked: dict[int, tuple[Any, asyncio.Future[m.Answer]]] = {}  # not answered yet

    @property
    def is_attached(self) -> bool:
        return self._away_s is None and self.gone is None

    @property
    def unreachable_s(self) -> float:
        """For how long the coordinator has been away."""
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

    def tell(self, message: Any) -> None:
        """Say something that needs no answer; dropped while nobody can hear it."""
        if self.is_attached:
            try:
                self._channel.send(message)
            except PeerLost as error:  # it does not read: `_listen` sees the closed channel
                log.warning("%s: coordinator %s: %s", self.name, self.address, error)

    async def ask(self, make: Callable[[int], Any], timeout_s: float) -> m.Answer:
        """Say something and wait for the answer, also from a coordinator that is to come back."""
        if self.gone is not None:
            raise self.gone
        request_id = self.next_id()
        message = make(request_id)
        answer: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = (message, answer)
        try:
            self.tell(message)
            return await self._answered(answer, timeout_s)
        finally:
            self._asked.pop(request_id, None)

    async def leave(self, farewell: Any) -> None:
        """Say a last word and close the connection; one that is away is waited for, not long."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while self._is_lasting and not self.is_attached and time.monotonic() < deadline_s:
            await asyncio.sleep(_FIRST_PAUSE_S)
        self.tell(farewell)
        for task in self._tasks:
            task.cancel()
        self.gone = self._lost("this member has left the job")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.finish()
        self.give_up(self.gone)

    def cut(self) -> None:
        """Break the connection without a word, as the death of a process does."""
        self._channel.close()

    def give_up(self, error: errors.PacelineError) -> None:
        """Be done with the coordinator; whoever waits for an answer gets this error."""
        self.gone = error
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
        # With this a host that vanished without a word is noticed by the heartbeats it no longer
        # acknowledges.
        limit_ms = int(self._vanished_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        self.local_address = sock.getsockname()[0]
        what = f"{self.name}: coordinator {self.address}"
        session = await introduce(sock, handshake, what=what)
        return await Channel.over(sock, session, self._decoder)

    async def _listen(self) -> None:
        try:
            while True:
                why = await self._read()
                if not self._is_lasting or self.gone is not None:
                    break
                self._away_s = time.monotonic()
                log.debug("%s: coordinator %s: %s; trying again", self.name, self.address, why)
                await self._come_back()
            if self.gone is None:
                self.give_up(self._lost(why))
        finally:
            if self.gone is None:  # whatever went wrong, nobody shall wait for an answer
                self.give_up(self._lost("its messages are no longer read"))

    async def _read(self) -> str:
        """Take in messages until the connection ends; return why it did."""
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
        except Exception:  # a watcher's bug must not cost us the connection
            log.exception("%s: a callback failed for %r", self.name, message)

    async def _come_back(self) -> None:
        """Connect again, however long it takes; then say who we are and ask again."""
        self._channel.close()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                self._channel = await asyncio.wait_for(self._connect(), ATTEMPT_S)
                break
            except (OSError, asyncio.TimeoutError, errors.PacelineError) as error:
                log.debug("%s: coordinator %s: %r", self.name, self.address, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        self._away_s = None
        unanswered = [message for message, answer in self._asked.values() if not answer.done()]
        for message in [*self.greet(), *unanswered]:
            self.tell(message)

    async def _beat(self) -> None:
        while self.gone is None:
            self.tell(m.Heartbeat())
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
