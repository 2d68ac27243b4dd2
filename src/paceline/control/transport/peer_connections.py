"""Links: authenticated connections between members, handed to the C++ core as file descriptors.

Every member listens on an abstract Unix socket, and on TCP when the job has several hosts. Of two
members the lower rank connects and the higher one waits. Both name the same purpose ("local",
"group:7"), so that several links between the same two are never mixed up. A descriptor is
non-blocking, detached from Python and positioned exactly after the handshake. Its receiver owns it.
Links that leave the machine are encrypted by the core, with the keys that come with the descriptor.

A link that has arrived waits until it is taken. How many wait is limited: a listener that is full
hangs up, and the caller tries again until its timeout.

Threads: an asyncio loop in "paceline-links", or one that is passed in. Public methods block and
may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import socket
from collections.abc import Callable, Collection
from typing import Any, Protocol

from paceline.control.member import Member
from paceline.control.transport.acceptor import Acceptor, Wire, introduce
from paceline.control.transport.auth import CallerHandshake, Hello, Session
from paceline.control.transport.link_encryption import (
    CIPHERS,
    CROSSED,
    Link,
    LinkKeys,
    refusal,
    split_cipher,
    with_cipher,
)
from paceline.control.transport.loop_thread import LoopThread
from paceline.control.transport.sockets import (
    connect_tcp,
    connect_unix,
    has_hung_up,
    is_encrypted,
    join_address,
    keep_trying,
    listen_tcp,
    listen_unix,
    receive_frame,
    send_frame,
)
from paceline.errors import ConfigError, RendezvousError, UsageError
from paceline.runtime.config import encryption

_Key = tuple[int, str]  # rank of the caller, purpose
_MAX_OF_ONE = 256  # links of one caller that wait to be taken
_MAX_OF_ALL = 4096


class Crossed(Exception):
    """The other member is connecting to this one, for the same purpose."""


class Router(Protocol):
    """Takes links as soon as they arrive. Called in the listener's loop."""

    def refusal(self, rank: int, purpose: str) -> str:
        """Return why a link is refused; "" if it is not."""

    def take(self, rank: int, purpose: str, link: Link | None) -> bool:
        """Take a link that was not refused; None: its caller has gone. False: it has to wait."""


class LinkListener:
    """One member's end of all its links. `choose_cipher` is called for links that it encrypts."""

    def __init__(
        self,
        secret: bytes,
        job_id: str,
        rank: int,
        bind_address: str = "127.0.0.1",
        want_tcp: bool = False,
        *,
        role: str = "worker",
        thread: LoopThread | None = None,
        choose_cipher: Callable[[], str] = lambda: CIPHERS[0],
    ) -> None:
        self._secret, self._job_id, self._rank, self._role = secret, job_id, rank, role
        self._encryption, self._choose_cipher = encryption(), choose_cipher
        self._arrived: dict[_Key, tuple[socket.socket, LinkKeys | None]] = {}
        self._refused: dict[_Key, str] = {}  # why
        self._room = min(_MAX_OF_ALL, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._expected: dict[_Key, asyncio.Future[None]] = {}
        self._router: Router | None = None
        self._watched: list[int] = []
        # Always plain: the C++ core owns these sockets and what travels on them.
        self._acceptor = Acceptor(
            secret, job_id=job_id, listener=_name(rank), admit=self._admit, is_always_plain=True
        )
        self.unix_name = f"paceline-{secrets.token_hex(16)}"
        self.tcp_address = ""
        listeners = []
        if want_tcp:
            listeners.append(listen_tcp(bind_address))
            self.tcp_address = join_address(bind_address, listeners[0].getsockname()[1])
        listeners.append(listen_unix(self.unix_name))
        self._owns_thread = thread is None
        self._thread = thread or LoopThread("paceline-links")
        self._thread.call(self._open(listeners))

    def connect(self, member: Member, purpose: str, local: bool, timeout_s: float = 10.0) -> Link:
        """Connect to another member; the caller owns the link's descriptor.

        `local` chooses the Unix socket, else TCP. ConnectError names the address and the tries.
        ConfigError if only one of the two members encrypts.
        """
        return self._thread.call(self._connect(member, purpose, local, timeout_s))

    def accepted(self, rank: int, purpose: str, timeout_s: float = 10.0) -> Link:
        """Wait for another member to connect; the caller owns the link's descriptor.

        ConfigError if only one of the two members encrypts.
        """
        return self._thread.call(self._take((rank, purpose), timeout_s))

    def has_arrived(self, rank: int, purpose: str) -> bool:
        """Return whether `accepted` would return, or raise, at once."""
        key = (rank, purpose)
        return key in self._arrived or key in self._refused

    def route(self, router: Router) -> None:
        """Offer each link that arrives to this router first."""
        self._router = router

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call a function in the loop whenever a descriptor is readable, until `close`."""
        self._watched.append(own := os.dup(fd))
        self.call(lambda: asyncio.get_running_loop().add_reader(own, on_readable))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the loop, and wait for it."""

        async def run() -> None:
            function()

        self._thread.call(run())

    def take_arrived(self, purposes: Collection[str]) -> list[tuple[int, str, Link]]:
        """Return the links for these purposes that wait, with their callers. In the loop."""
        keys = [key for key in self._arrived if key[1] in purposes]
        links = [(key, self._arrived.pop(key)) for key in keys]
        return [(*key, Link(sock.detach(), keys)) for key, (sock, keys) in links]

    async def dial(self, member: Member, purpose: str, timeout_s: float) -> Link:
        """Connect to a member on another host as `connect` does. In the loop.

        Raises Crossed if that member is connecting to this one."""
        return await self._connect(member, purpose, False, timeout_s)

    def close(self) -> None:
        """Stop listening and drop links that were not taken. May be called twice."""
        if self._thread.is_running:
            self._thread.call(self._close())
            if self._owns_thread:
                self._thread.stop()

    async def _open(self, listeners: list[socket.socket]) -> None:
        self._acceptor.open(*listeners)

    async def _connect(self, member: Member, purpose: str, local: bool, timeout_s: float) -> Link:
        where = f"unix:{member.unix}" if local else member.tcp

        async def attempt() -> tuple[socket.socket, LinkKeys | None]:
            sock = await (connect_unix(member.unix) if local else connect_tcp(member.tcp))
            try:
                return sock, await self._introduce(sock, member, purpose, what)
            except BaseException:
                sock.close()
                raise

        what = f"rank {self._rank}: rank {member.rank} ({member.where}) at {where}"
        sock, keys = await keep_trying(attempt, what=what, timeout_s=timeout_s)
        return Link(sock.detach(), keys)

    async def _introduce(
        self, sock: socket.socket, member: Member, purpose: str, what: str
    ) -> LinkKeys | None:
        cipher = self._choose_cipher() if self._encrypts(sock, sock.getpeername()) else ""
        handshake = CallerHandshake(
            self._secret,
            job_id=self._job_id,
            listener=_name(member.rank),
            role=self._role,
            rank=self._rank,
            purpose=with_cipher(purpose, cipher),
        )
        session = await introduce(sock, handshake, what=what)
        if sock.family != socket.AF_UNIX:
            reason = session.open(await receive_frame(sock))
            if reason == CROSSED.encode():
                raise Crossed
            if reason:
                raise ConfigError(f"{what}: {reason.decode(errors='replace')}")
        return LinkKeys.of(session, cipher)

    def _encrypts(self, sock: socket.socket, listener: Any) -> bool:
        return is_encrypted(sock.family, listener, self._encryption)

    async def _admit(self, sock: Wire, session: Session, caller: Hello) -> None:
        assert isinstance(sock, socket.socket)
        purpose, cipher = split_cipher(caller.purpose)
        key = (caller.rank, purpose)
        if not self._has_room(key):
            self._acceptor.note_refusal(
                RendezvousError(
                    f"rank {caller.rank} connects for {purpose!r}, but {len(self._arrived)} links"
                    f" wait for this process to use them, the most that it keeps"
                )
            )
            sock.close()
            return
        encrypts = self._encrypts(sock, sock.getsockname())
        reason = refusal(caller.rank, cipher, self._rank, encrypts, self._encryption)
        router = None if sock.family == socket.AF_UNIX else self._router
        if router is not None and not reason:
            reason = router.refusal(caller.rank, purpose)
        if sock.family != socket.AF_UNIX:
            try:
                await send_frame(sock, session.seal(reason.encode()))
            except BaseException as error:
                sock.close()
                if router is not None and not reason:
                    router.take(caller.rank, purpose, None)
                if isinstance(error, OSError):
                    return  # the caller is gone
                raise
        if reason == CROSSED:
            sock.close()
            return
        if router is not None and not reason:
            link = Link(os.dup(sock.fileno()), LinkKeys.of(session, cipher))
            if router.take(caller.rank, purpose, link):
                sock.close()
                return
            os.close(link.fd)
        previous = self._arrived.pop(key, None)
        if previous is not None:
            previous[0].close()  # its caller gave up waiting for our answer and connected again
        if reason:
            sock.close()
            self._refused[key] = reason
            if len(self._refused) > self._room:
                del self._refused[next(iter(self._refused))]
        else:
            self._arrived[key] = sock, LinkKeys.of(session, cipher)
        expected = self._expected.get(key)
        if expected is not None and not expected.done():
            expected.set_result(None)

    def _has_room(self, key: _Key) -> bool:
        """Return whether one more link can wait; drops links whose callers have hung up."""
        if key in self._expected or key in self._arrived or self._is_below_limits(key):
            return True
        for one in [one for one, (sock, _) in self._arrived.items() if has_hung_up(sock)]:
            self._arrived.pop(one)[0].close()
        return self._is_below_limits(key)

    def _is_below_limits(self, key: _Key) -> bool:
        of_one = sum(rank == key[0] for rank, _ in self._arrived)
        return of_one < _MAX_OF_ONE and len(self._arrived) < self._room

    async def _take(self, key: _Key, timeout_s: float) -> Link:
        if key in self._expected:
            raise UsageError(f"two threads wait for rank {key[0]} to connect for {key[1]!r}")
        if key not in self._arrived and key not in self._refused:
            self._expected[key] = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._expected[key], timeout_s)
            except asyncio.TimeoutError:
                raise RendezvousError(
                    f"rank {self._rank} waited {timeout_s:g} s for rank {key[0]} to connect for"
                    f" {key[1]!r}; it may have failed or taken another path"
                ) from None
            finally:
                del self._expected[key]
        if key not in self._arrived:
            raise ConfigError(self._refused.pop(key))
        sock, keys = self._arrived.pop(key)
        return Link(sock.detach(), keys)

    async def _close(self) -> None:
        for fd in self._watched:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._watched.clear()
        await self._acceptor.close()
        for sock, _ in self._arrived.values():
            sock.close()
        self._arrived.clear()


def _name(rank: int) -> str:
    """Return a listener's name in the handshake: rank 5 cannot answer a call for rank 3."""
    return f"rank {rank}"
