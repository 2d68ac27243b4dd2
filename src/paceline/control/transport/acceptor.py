"""Accepts connections and authenticates them.

Before it is authenticated, a connection is limited to frames of at most 4 KiB and 5 seconds in all,
and at most 64 connections wait at a time. If there are more, the oldest one is closed: an honest
handshake takes milliseconds, so the oldest is most likely an attacker's. An honest caller that was
closed connects again. No stranger can delay another, and a refused caller is not sent the reason.
On connections that leave the machine these limits include the TLS handshake (tls.py).

Threads: everything runs in the asyncio loop that called `open`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable

from paceline.control.transport.auth import CallerHandshake, Hello, ListenerHandshake, Session
from paceline.control.transport.certificate import tls_contexts
from paceline.control.transport.sockets import (
    MAX_HELLO_BYTES,
    close_in_children,
    is_encrypted,
    receive_frame,
    send_frame,
)
from paceline.control.transport.tls import ALERT, TlsStream
from paceline.errors import AuthError, ConnectError, PacelineError
from paceline.runtime.config import encryption

HANDSHAKE_S = 5.0
MAX_STRANGERS = 64  # connections that are not authenticated yet
_GRACE_S = 0.05  # a younger stranger is not closed: it may be honest, on a busy machine

log = logging.getLogger("paceline.control")

Wire = socket.socket | TlsStream  # plain or encrypted
Admit = Callable[[Wire, Session, Hello], Awaitable[None]]


class Acceptor:
    """Accepts connections on some sockets and passes the authenticated ones to `admit`.

    `admit` owns the connection, and runs in its own task, for as long as it needs. With
    `is_always_plain`, connections to other hosts are not encrypted here: `admit` gets sockets only.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        job_id: str,
        listener: str,
        admit: Admit,
        handshake_s: float = HANDSHAKE_S,
        is_always_plain: bool = False,
    ) -> None:
        self._secret, self._job_id, self._listener, self._admit = secret, job_id, listener, admit
        self._handshake_s = handshake_s
        self._encryption = "off" if is_always_plain else encryption()
        self._strangers: dict[asyncio.Task[None], float] = {}  # in order of arrival
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []
        self.refused = 0

    def open(self, *listeners: socket.socket) -> None:
        """Start to accept; `close` also closes the listening sockets."""
        for listener in listeners:
            if self._encrypts(listener):
                tls_contexts(self._secret)  # not while a caller waits
            self._sockets.append(listener)
            self._start(self._accept(listener))

    async def close(self) -> None:
        """Stop accepting and end every connection's task."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()

    def _start(self, coroutine: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the caller is gone already
                self.note_refusal(error)
                await asyncio.sleep(_GRACE_S)
                continue
            task = self._start(self._serve(close_in_children(sock)))
            self._strangers[task] = time.monotonic()

    async def _make_room(self) -> None:
        while len(self._strangers) >= MAX_STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            age_s = time.monotonic() - since
            if age_s >= _GRACE_S:
                self._strangers.pop(oldest)
                oldest.cancel()
            else:
                await asyncio.sleep(_GRACE_S - age_s)

    async def _serve(self, sock: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            admitted = await asyncio.wait_for(self._authenticate(sock), self._handshake_s)
        except (PacelineError, OSError, asyncio.TimeoutError) as error:
            self.note_refusal(error)
            return
        finally:
            self._strangers.pop(task, None)
        await self._admit(*admitted)

    async def _authenticate(self, sock: socket.socket) -> tuple[Wire, Session, Hello]:
        """Return an authenticated connection; it is closed on any failure."""
        wire: Wire = sock
        try:
            self._prepare(sock)
            if self._encrypts(sock):
                wire = await TlsStream.over(sock, self._secret, is_listener=True)
            return wire, *await self._shake_hands(wire)
        except BaseException:
            _drop(wire)
            raise

    def _encrypts(self, sock: socket.socket) -> bool:
        return is_encrypted(sock.family, sock.getsockname(), self._encryption)

    def _prepare(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            _require_same_user(sock)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def _shake_hands(self, wire: Wire) -> tuple[Session, Hello]:
        handshake = ListenerHandshake(self._secret, job_id=self._job_id, listener=self._listener)
        try:
            hello = await receive_frame(wire)
        except ConnectError:  # it begins with TLS
            if isinstance(wire, socket.socket):
                with contextlib.suppress(OSError):
                    wire.recv(MAX_HELLO_BYTES)  # closing with unread data would drop the alert
                    wire.send(ALERT)
            raise
        await send_frame(wire, handshake.challenge(hello))
        handshake.require_version()
        await send_frame(wire, handshake.accept(await receive_frame(wire)))
        return handshake.session, handshake.caller

    def note_refusal(self, error: Exception) -> None:
        """Count refusals; log the 1st, 2nd, 4th, 8th ... so that a flood cannot fill the disk."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            text = str(error) or f"handshake not finished in {self._handshake_s:g} s"
            log.warning("%s refused %d connections: %s", self._listener, self.refused, text)


async def introduce(sock: socket.socket, handshake: CallerHandshake, *, what: str) -> Session:
    """Run the caller's side on a new link to `what`; close the socket on any failure."""
    return await _introduce(sock, handshake, what)


async def introduce_control(
    sock: socket.socket, handshake: CallerHandshake, *, what: str, setting: str | None = None
) -> tuple[Wire, Session]:
    """Run the caller's side on a new control connection to `what`, inside TLS if it leaves the
    machine; return what `Channel.over` needs. The socket is closed on any failure.

    `setting` is "on", "off" or "always"; None: that of the job."""
    wire: Wire = sock
    if is_encrypted(sock.family, sock.getpeername(), setting or encryption()):
        try:
            wire = await TlsStream.over(sock, handshake.secret, is_listener=False)
        except AuthError:
            raise AuthError(f"{what}: {handshake.wrong_listener()}") from None
        except PacelineError as error:
            raise type(error)(f"{what}: {error}") from None
    return wire, await _introduce(wire, handshake, what)


async def _introduce(wire: Wire, handshake: CallerHandshake, what: str) -> Session:
    try:
        await send_frame(wire, handshake.hello())
        await send_frame(wire, handshake.answer(await receive_frame(wire)))
        return handshake.finish(await receive_frame(wire))
    except PacelineError as error:
        _drop(wire)
        raise type(error)(f"{what}: {error}") from None
    except BaseException:
        _drop(wire)
        raise


def _drop(wire: Wire) -> None:
    if isinstance(wire, socket.socket):
        wire.close()
    else:
        wire.abort()


def _require_same_user(sock: socket.socket) -> None:
    """Raise AuthError for a Unix peer of another user: the kernel vouches for the uid."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.getuid():
        raise AuthError(f"a process of uid {uid} connected, expected uid {os.getuid()}")
