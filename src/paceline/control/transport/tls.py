"""TLS 1.3 on control connections that leave the machine.

Both ends decide by the listener's address, before the first byte: loopback addresses and Unix
sockets are plain, every other connection is encrypted, unless PACELINE_ENCRYPT says otherwise.
Neither end falls back to the other kind. If they disagree, the connection is refused with a TLS
alert, which both a TLS and a plain peer of ours recognise.

The handshake of auth.py runs inside. TLS proves that the peer has the job's secret; auth.py proves
which process of which job it is.

A stranger may send 8 KiB before it has proved that it has the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from paceline.control.transport.certificate import TlsContexts, tls_contexts
from paceline.errors import AuthError, BadFrame, ConnectError, PacelineError

MAX_HANDSHAKE_BYTES = 8192
ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # fatal, protocol_version
_HANDSHAKE_RECORD = 0x16
_PIECE_BYTES = 1 << 18
_ADVICE = "set PACELINE_ENCRYPT to the same value in every process of the job"


class TlsStream(asyncio.Protocol):
    """One end of an encrypted connection; used as reader and writer. Belongs to one loop."""

    def __init__(self, contexts: TlsContexts, *, is_listener: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = contexts.listener if is_listener else contexts.caller
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_listener)
        self._certificate, self._is_listener = contexts.certificate, is_listener
        self._num_unproven = 0  # bytes received before the peer's certificate was verified
        loop = asyncio.get_running_loop()
        self._is_open: asyncio.Future[None] = loop.create_future()
        self._is_closed: asyncio.Future[None] = loop.create_future()
        self.reader = asyncio.StreamReader()
        self.transport: asyncio.Transport

    @classmethod
    async def over(cls, sock: socket.socket, secret: bytes, *, is_listener: bool) -> TlsStream:
        """Encrypt a new connection; the stream owns the socket, and closes it on any failure.

        Raises AuthError if the peer has another secret, ConnectError if it does not speak TLS 1.3.
        """
        try:
            stream = cls(tls_contexts(secret), is_listener=is_listener)
            await asyncio.get_running_loop().create_connection(lambda: stream, sock=sock)
        except BaseException:
            sock.close()
            raise
        try:
            await stream._is_open
        except BaseException:
            stream.abort()
            raise
        return stream

    # -- used by frames and channels ---------------------------------------------------------

    async def read_exactly(self, size: int) -> bytes:
        """Return so many bytes; ConnectionError if the peer closes before."""
        try:
            return await self.reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the peer closed the connection") from None

    def write(self, data: bytes) -> None:
        """Encrypt and queue; dropped if the connection is closed."""
        rest = memoryview(data)
        while rest and not self.transport.is_closing():
            rest = rest[self._tls.write(rest[:_PIECE_BYTES]) :]
            self._flush()

    def write_eof(self) -> None:
        """Announce that nothing follows; what the peer sends can still be read."""
        self._notify_end()
        if not self.transport.is_closing():
            self.transport.write_eof()

    def close(self) -> None:
        """Send what is queued in the background, then close."""
        self._notify_end()
        self.transport.close()

    def abort(self) -> None:
        """Close at once; what is queued is dropped."""
        self.transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._is_closed)

    # -- called by the loop ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.reader.set_transport(transport)
        if not self._is_listener:
            self._advance()

    def data_received(self, data: bytes) -> None:
        if not self._is_open.done():
            problem = self._refusal(data)
            if problem is not None:
                self._fail(problem)
                return
        self._incoming.write(data)
        self._advance()

    def eof_received(self) -> bool:
        self._end(ConnectionResetError("the peer closed the connection"))
        return True  # we may still have something to send

    def connection_lost(self, error: Exception | None) -> None:
        is_broken = error is not None and not self.reader.at_eof()
        self._end(error or ConnectionResetError("the connection was closed"), is_broken=is_broken)
        if not self._is_closed.done():
            self._is_closed.set_result(None)

    # -- TLS ---------------------------------------------------------------------------------

    def _refusal(self, data: bytes) -> PacelineError | None:
        """Return why data of a peer that has proved nothing yet cannot be accepted."""
        if self._is_listener and self._num_unproven == 0 and data[0] != _HANDSHAKE_RECORD:
            self.transport.write(ALERT)
            return ConnectError(f"a caller does not speak TLS, which is expected here; {_ADVICE}")
        self._num_unproven += len(data)
        if self._num_unproven > MAX_HANDSHAKE_BYTES:
            return BadFrame(f"a TLS handshake of more than {MAX_HANDSHAKE_BYTES} bytes")
        return None

    def _advance(self) -> None:
        """Handle what has arrived: steps of the handshake, then data."""
        try:
            if not self._is_open.done():
                self._tls.do_handshake()
                if self._tls.getpeercert(binary_form=True) != self._certificate:
                    raise AuthError("the peer has another certificate than that of this job")
                self._is_open.set_result(None)
            while data := self._tls.read(_PIECE_BYTES):
                self.reader.feed_data(data)
            self.reader.feed_eof()  # the peer announced the end
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._flush()  # the alert, which names our reason to the peer's TLS
            self._fail(error if self._is_open.done() else self._explained(error))
        except AuthError as error:
            self._fail(error)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending and not self.transport.is_closing():
            self.transport.write(self._outgoing.read())

    def _notify_end(self) -> None:
        # SSLWantReadError: the peer's own announcement has not come yet.
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()

    def _fail(self, error: Exception) -> None:
        self._end(error)
        self.transport.close()

    def _end(self, error: Exception, *, is_broken: bool = False) -> None:
        """No more data comes, because of `error`; before the handshake is done this is a failure.

        `is_broken`: the peer did not close the connection, and the reader gets the error.
        """
        if not self._is_open.done():
            self._is_open.set_exception(error)
            self._is_open.exception()  # retrieved, also if its reader was cancelled
        elif isinstance(error, ssl.SSLError) or is_broken:
            self.reader.set_exception(error)
        else:
            self.reader.feed_eof()

    def _explained(self, error: ssl.SSLError) -> PacelineError:
        """Return an error that says what to check."""
        reason = error.reason or str(error)
        if "PROTOCOL" in reason:
            return ConnectError(f"the peer does not speak TLS 1.3 ({reason}); {_ADVICE}")
        if isinstance(error, ssl.SSLCertVerificationError) or "CA" in reason.split("_"):
            return AuthError(f"the peer has another secret ({reason})")
        return AuthError(f"the TLS handshake failed ({reason}); has the peer our secret?")
