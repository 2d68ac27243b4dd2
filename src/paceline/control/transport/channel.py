"""A control connection: typed messages in sealed frames over an authenticated stream.

Each frame is a 4-byte length, a msgpack message and its tag (see `auth.Session`). A frame that is
too long, has a wrong tag or holds an unexpected message ends the connection. `send` never waits. A
peer that does not read is disconnected when its backlog exceeds a bound, so that it costs the other
peers neither memory nor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from paceline.control.transport.auth import TAG_BYTES, Session
from paceline.control.transport.sockets import MAX_FRAME_BYTES, SocketOptions, frame, frame_size
from paceline.control.transport.tls import TlsStream
from paceline.errors import BadFrame, PeerLost, UsageError

MAX_BACKLOG_BYTES = 2 * MAX_FRAME_BYTES
_GOODBYE_S = 2.0

M = TypeVar("M")


class Writer(Protocol):
    """The sending side of a connection: an asyncio.StreamWriter or a TlsStream."""

    @property
    def transport(self) -> asyncio.WriteTransport: ...
    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


class Channel(Generic[M]):
    """One end of a control connection that receives messages of type M. Belongs to one loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: Writer,
        session: Session,
        decoder: msgspec.msgpack.Decoder[M],
    ) -> None:
        self._reader, self._writer, self._session = reader, writer, session
        self._decoder = decoder

    @classmethod
    async def over(
        cls,
        sock: socket.socket | TlsStream,
        session: Session,
        decoder: msgspec.msgpack.Decoder[M],
    ) -> Channel[M]:
        """Take over an authenticated connection."""
        if isinstance(sock, TlsStream):
            return cls(sock.reader, sock, session, decoder)
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, session, decoder)

    @property
    def backlog_bytes(self) -> int:
        """How much of what was sent the peer has not read yet."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def socket(self) -> SocketOptions:
        """The socket of this connection, for its options."""
        found: SocketOptions = self._writer.transport.get_extra_info("socket")
        return found

    @property
    def local_address(self) -> str:
        """The address of this end of a TCP connection, without the port."""
        return str(self._writer.transport.get_extra_info("sockname")[0])

    def send(self, message: Any) -> None:
        """Queue a message; PeerLost if the peer has not read for long."""
        payload = msgspec.msgpack.encode(message)
        if len(payload) + TAG_BYTES > MAX_FRAME_BYTES:
            raise UsageError(
                f"{type(message).__name__} of {len(payload)} bytes is too large for the control"
                f" plane (at most {MAX_FRAME_BYTES - TAG_BYTES}); send tensors through a group"
            )
        if self.backlog_bytes > MAX_BACKLOG_BYTES:
            self.close()
            raise PeerLost("the peer does not read what it is sent; its connection was dropped")
        self._writer.write(frame(self._session.seal(payload)))

    async def receive(self) -> M:
        """Return the next message; OSError or EOFError if the connection has ended."""
        size = frame_size(await self._reader.readexactly(4), MAX_FRAME_BYTES)
        if size < TAG_BYTES:
            raise BadFrame(f"control frame of {size} bytes, expected at least {TAG_BYTES}")
        payload = self._session.open(await self._reader.readexactly(size))
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(f"control message cannot be decoded: {error}") from None

    def close(self) -> None:
        """Send what is queued in the background, then close."""
        self._writer.close()

    async def finish(self) -> None:
        """Send what is queued, then close; wait a moment for the peer to do the same."""
        # Closing with unread data resets the connection, and the peer would lose our last messages.
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            self._writer.write_eof()
            await asyncio.wait_for(self._reader.read(-1), _GOODBYE_S)
        self._writer.close()
        # A peer that is gone or does not read must not keep us from leaving.
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), _GOODBYE_S)
