"""The member's side of the control plane.

An agent holds one authenticated connection to the coordinator. It sends heartbeats by itself,
joins the job, reports events and asks the store. When the coordinator goes away, calls that need
it raise PeerLost, while the membership and the links made with it stay usable: training does not
depend on the coordinator.

Threads: one background thread ("paceline-control") with an asyncio loop owns the connection. All
public methods block, may be called from any thread but that one, and carry their own deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from paceline import errors
from paceline.cluster import messages as m
from paceline.cluster.auth import CallerHandshake
from paceline.cluster.channel import Channel
from paceline.cluster.gate import introduce
from paceline.cluster.loop_thread import LoopThread
from paceline.cluster.member import Member, Membership
from paceline.cluster.notice import WaitNotice, say
from paceline.cluster.sockets import connect_tcp, keep_trying
from paceline.errors import PeerLost, PeerTimeout
from paceline.telemetry.events import Event

HEARTBEAT_S = 1.0
_VANISHED_S = 15.0
_ANSWER_S = 10.0  # a coordinator that is alive answers within this

T = TypeVar("T")

log = logging.getLogger("paceline.cluster")
_decoder = msgspec.msgpack.Decoder(m.CoordinatorMessage)


class Agent:
    """Speaks with the coordinator for one member; made by `Agent.connect`."""

    def __init__(self, address: str, rank: int, heartbeat_s: float) -> None:
        self.thread = LoopThread("paceline-control")
        self.membership: Membership | None = None
        self.presence: dict[int, m.Presence] = {}  # last known change of each other rank
        self.on_presence: Callable[[m.Presence], None] | None = None  # called in the thread
        self.num_workers: int | None = None  # ranks behind them are servers; None: not known
        self.local_address = ""  # ours in the network through which the coordinator is reached
        self._address, self._rank, self._heartbeat_s = address, rank, heartbeat_s
        self._channel: Channel[m.CoordinatorMessage]
        self._tasks: list[asyncio.Task[None]] = []
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[m.CoordinatorMessage]] = {}
        self._gone: str | None = None  # why the coordinator cannot be asked any more

    @classmethod
    def connect(
        cls,
        address: str,
        secret: bytes,
        job_id: str,
        rank: int,
        role: str = "worker",
        *,
        timeout_s: float = 10.0,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> Agent:
        """Connect and authenticate; raises ConnectError, AuthError or VersionMismatch."""
        agent = cls(address, rank, heartbeat_s)
        try:
            agent.thread.call(agent._open(secret, job_id, role, timeout_s))
        except BaseException:
            agent.thread.stop()
            raise
        return agent

    def join(self, member: Member, timeout_s: float = 60.0) -> Membership:
        """Wait until every rank of the job has joined; RendezvousError names what is wrong."""
        reply = self._ask(lambda n: m.Join(n, member, timeout_s), timeout_s + _ANSWER_S)
        self.membership = _expect(reply, m.Joined).membership
        return self.membership

    def report(self, event: Event) -> None:
        """Pass an event to whoever watches the job. Returns at once; dropped when nobody can."""
        if self._gone is None:
            self.thread.post(self._tell, m.Report(event))

    def leave(self) -> None:
        """Tell the coordinator that this member ends in good order; no effect if it is gone."""
        if self._gone is None and self.thread.is_running:
            self.thread.call(self._leave())

    def close(self) -> None:
        """Leave, close the connection and end the thread. May be called twice."""
        self.leave()
        self.thread.stop()

    def store_set(self, key: str, value: bytes) -> None:
        self._ask(lambda n: m.StoreSet(n, key, value))

    def store_get(self, key: str, timeout_s: float = 300.0) -> bytes:
        """Wait until the key is set and return its value; PeerTimeout names the key."""
        value = self._value(lambda n: m.StoreGet(n, key, timeout_s), timeout_s + _ANSWER_S)
        return _expect(value, bytes)

    def store_add(self, key: str, amount: int) -> int:
        """Add to the number under key (absent counts as 0) and return the sum."""
        return _expect(self._value(lambda n: m.StoreAdd(n, key, amount)), int)

    def store_compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set key if its value is `expected` (b"" for absent); return the value that now counts."""
        return _expect(self._value(lambda n: m.StoreCompareSet(n, key, expected, desired)), bytes)

    def store_wait(self, keys: Iterable[str], timeout_s: float = 300.0) -> None:
        """Wait until all keys are set; PeerTimeout names those that are not."""
        names = tuple(keys)
        self._ask(lambda n: m.StoreWait(n, names, timeout_s), timeout_s + _ANSWER_S)

    def store_check(self, keys: Iterable[str]) -> bool:
        names = tuple(keys)
        return _expect(self._value(lambda n: m.StoreCheck(n, names)), bool)

    def store_delete(self, key: str) -> bool:
        return _expect(self._value(lambda n: m.StoreDelete(n, key)), bool)

    def store_num_keys(self) -> int:
        return _expect(self._value(m.StoreNumKeys), int)

    def _value(
        self, make: Callable[[int], m.MemberMessage], timeout_s: float = _ANSWER_S
    ) -> bytes | int | bool | None:
        return _expect(self._ask(make, timeout_s), m.Reply).value

    def _ask(
        self, make: Callable[[int], m.MemberMessage], timeout_s: float = _ANSWER_S
    ) -> m.CoordinatorMessage:
        if self._gone is not None:
            raise self._lost()
        reply = self.thread.call(self._request(make, timeout_s))
        if isinstance(reply, m.Failure):
            raise errors.named(reply.error, reply.text)
        return reply

    def _lost(self) -> PeerLost:
        return PeerLost(f"rank {self._rank}: coordinator {self._address}: {self._gone}")

    # Everything below runs in the control thread.

    async def _open(self, secret: bytes, job_id: str, role: str, timeout_s: float) -> None:
        notice = WaitNotice(f"rank {self._rank} waits for the coordinator at {self._address}")

        async def attempt() -> Channel[m.CoordinatorMessage]:
            notice.check()
            handshake = CallerHandshake(
                secret,
                job_id=job_id,
                listener=m.COORDINATOR,
                role=role,
                rank=self._rank,
                purpose="control",
            )
            sock = await connect_tcp(self._address)
            # With this a host that vanished without a word is noticed by the heartbeats it no
            # longer acknowledges.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_VANISHED_S * 1000))
            self.local_address = sock.getsockname()[0]
            session = await introduce(sock, handshake, what=what)
            return await Channel.over(sock, session, _decoder)

        what = f"rank {self._rank}: coordinator {self._address}"
        self._channel = await keep_trying(attempt, what=what, timeout_s=timeout_s)
        self._tasks = [asyncio.ensure_future(run()) for run in (self._listen, self._beat)]

    async def _listen(self) -> None:
        try:
            while True:
                self._on_message(await self._channel.receive())
        except (EOFError, OSError):
            self._give_up("it closed the connection or ended; membership and links stay usable")
        except errors.PacelineError as error:
            self._give_up(f"it sent something that cannot be trusted: {error}")
        finally:
            if self._gone is None:  # whatever went wrong, nobody shall wait for an answer
                self._give_up("its messages are no longer read")

    def _on_message(self, message: m.CoordinatorMessage) -> None:
        if isinstance(message, m.Presence):
            self._on_presence(message)
        elif isinstance(message, m.Missing):
            whom = _names(message.ranks, self.num_workers)
            so_far = f"({message.waited_s:.0f} s so far)"
            say(f"rank {self._rank} waits for {whom} to join {so_far}")
        elif isinstance(message, m.Reply | m.Joined | m.Failure):
            answer = self._answers.pop(message.id, None)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _on_presence(self, message: m.Presence) -> None:
        self.presence[message.rank] = message
        try:
            if self.on_presence is not None:
                self.on_presence(message)
        except Exception:  # a watcher's bug must not cost us the connection
            log.exception("on_presence failed for %r", message)

    async def _beat(self) -> None:
        while self._gone is None:
            self._tell(m.Heartbeat())
            await asyncio.sleep(self._heartbeat_s)

    def _tell(self, message: m.MemberMessage) -> None:
        if self._gone is None:
            try:
                self._channel.send(message)
            except PeerLost as error:
                self._give_up(str(error))

    async def _request(
        self, make: Callable[[int], m.MemberMessage], timeout_s: float
    ) -> m.CoordinatorMessage:
        request_id = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        try:
            self._tell(make(request_id))
            if self._gone is not None:
                raise self._lost()
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise PeerTimeout(
                f"rank {self._rank}: coordinator {self._address} has not answered for"
                f" {timeout_s:g} s; its process may be stopped"
            ) from None
        finally:
            self._answers.pop(request_id, None)

    def _give_up(self, why: str) -> None:
        self._gone = why
        self._channel.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._lost())

    async def _leave(self) -> None:
        self._tell(m.Leave())
        for task in self._tasks:
            task.cancel()
        self._give_up("this member has left the job")
        await self._channel.finish()


def _names(ranks: Sequence[int], num_workers: int | None) -> str:
    """Write 'rank 1 and servers 0, 1'."""
    first = max(ranks) + 1 if num_workers is None else num_workers
    workers = [rank for rank in ranks if rank < first]
    servers = [rank - first for rank in ranks if rank >= first]
    named = [
        f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for noun, numbers in (("rank", workers), ("server", servers))
        if numbers
    ]
    return " and ".join(named)


def _expect(value: object, kind: type[T]) -> T:
    """Check that the coordinator answered the question that was asked."""
    if not isinstance(value, kind):
        raise errors.ProtocolError(
            f"the coordinator answered with {type(value).__name__}, expected {kind.__name__};"
            " install the same Paceline version everywhere"
        )
    return value
