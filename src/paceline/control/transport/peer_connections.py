"""Links: authenticated connections between members, handed to the C++ core as file descriptors.

Every member listens on an abstract Unix socket, and on TCP when the job has several hosts. Of two
members the lower rank connects and the higher one waits. Both name the same purpose ("local",
"group:7"), so that several links between the same two are never mixed up. A descriptor is
non-blocking, detached from Python and positioned exactly after the handshake. Its receiver owns it.

Threads: an asyncio loop in "paceline-links", or one that is passed in. Public methods block and
may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

from paceline.control.member import Member
from paceline.control.transport.acceptor import Acceptor, introduce
from paceline.control.transport.auth import CallerHandshake, Hello, Session
from paceline.control.transport.loop_thread import LoopThread
from paceline.control.transport.sockets import (
    connect_tcp,
    connect_unix,
    join_address,
    keep_trying,
    listen_tcp,
    listen_unix,
)
from paceline.errors import RendezvousError, UsageError

_Key = tuple[int, str]  # rank of the caller, purpose


class LinkListener:
    """One member's end of all its links."""

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
    ) -> None:
        self._secret, self._job_id, self._rank, self._role = secret, job_id, rank, role
        self._arrived: dict[_Key, socket.socket] = {}
        self._expected: dict[_Key, asyncio.Future[None]] = {}
        self._acceptor = Acceptor(secret, job_id=job_id, listener=_name(rank), admit=self._admit)
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

    def connect(self, member: Member, purpose: str, local: bool, timeout_s: float = 10.0) -> int:
        """Connect to another member; return a file descriptor that the caller owns.

        `local` chooses the Unix socket, else TCP. ConnectError names the address and the tries.
        """
        return self._thread.call(self._connect(member, purpose, local, timeout_s))

    def accepted(self, rank: int, purpose: str, timeout_s: float = 10.0) -> int:
        """Wait for another member to connect; return a descriptor that the caller owns."""
        return self._thread.call(self._take((rank, purpose), timeout_s))

    def close(self) -> None:
        """Stop listening and drop links that were not taken. May be called twice."""
        if self._thread.is_running:
            self._thread.call(self._close())
            if self._owns_thread:
                self._thread.stop()

    async def _open(self, listeners: list[socket.socket]) -> None:
        self._acceptor.open(*listeners)

    async def _connect(self, member: Member, purpose: str, local: bool, timeout_s: float) -> int:
        where = f"unix:{member.unix}" if local else member.tcp

        async def attempt() -> socket.socket:
            handshake = CallerHandshake(
                self._secret,
                job_id=self._job_id,
                listener=_name(member.rank),
                role=self._role,
                rank=self._rank,
                purpose=purpose,
            )
            sock = await (connect_unix(member.unix) if local else connect_tcp(member.tcp))
            await introduce(sock, handshake, what=what)
            return sock

        what = f"rank {self._rank}: rank {member.rank} ({member.where}) at {where}"
        return (await keep_trying(attempt, what=what, timeout_s=timeout_s)).detach()

    async def _admit(self, sock: socket.socket, session: Session, caller: Hello) -> None:  # noqa: ARG002
        key = (caller.rank, caller.purpose)
        previous = self._arrived.pop(key, None)
        if previous is not None:
            previous.close()  # its caller gave up waiting for our answer and connected again
        self._arrived[key] = sock
        expected = self._expected.get(key)
        if expected is not None and not expected.done():
            expected.set_result(None)

    async def _take(self, key: _Key, timeout_s: float) -> int:
        if key in self._expected:
            raise UsageError(f"two threads wait for rank {key[0]} to connect for {key[1]!r}")
        if key not in self._arrived:
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
        return self._arrived.pop(key).detach()

    async def _close(self) -> None:
        await self._acceptor.close()
        for sock in self._arrived.values():
            sock.close()
        self._arrived.clear()


def _name(rank: int) -> str:
    """Return a listener's name in the handshake: rank 5 cannot answer a call for rank 3."""
    return f"rank {rank}"
