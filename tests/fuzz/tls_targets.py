"""Targets of TLS on control connections: bytes before the peer has proved that it has the secret,
and changed bytes of a peer that has it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from fuzz.target import target
from paceline.control.transport.certificate import tls_contexts
from paceline.control.transport.tls import MAX_HANDSHAKE_BYTES, TlsStream
from paceline.errors import PacelineError

SECRET = bytes(range(32))
_loop = asyncio.new_event_loop()
_REFUSED = (PacelineError, ssl.SSLError, OSError)


class Socket(asyncio.Transport):
    """Stands for the transport of a stream: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.is_closed


def _stream(*, is_listener: bool) -> TlsStream:
    stream = TlsStream(tls_contexts(SECRET), is_listener=is_listener)
    stream.connection_made(Socket())
    return stream


def _give(stream: TlsStream, data: bytes, piece: int) -> int:
    """Let this arrive, in pieces, as long as the connection is open; return how much has."""
    at = 0
    while at < len(data) and not stream.transport.is_closing():
        stream.data_received(data[at : at + piece])
        at += piece
    return at


def _in_loop(run: Callable[[], None]) -> None:
    async def call() -> None:
        run()

    _loop.run_until_complete(call())


def _stranger(data: bytes, *, is_listener: bool) -> None:
    """The first byte is the size of the pieces: nothing is proved by any bytes that are made up."""

    def run() -> None:
        stream, piece = _stream(is_listener=is_listener), 1 + data[0] * 8 if data else 1
        taken = _give(stream, data[1:], piece)
        assert taken <= MAX_HANDSHAKE_BYTES + piece, "a stranger is read without limit"
        stream.connection_lost(None)
        error = stream._is_open.exception()
        assert isinstance(error, _REFUSED), f"a stranger was accepted, or {error!r}"

    _in_loop(run)


@target()
def tls_listener(data: bytes) -> None:
    _stranger(data, is_listener=True)


@target()
def tls_caller(data: bytes) -> None:
    _stranger(data, is_listener=False)


def _changed(data: bytes, edits: bytes) -> bytes:
    """Change bytes: two of each edit are the position, one is the difference."""
    found = bytearray(data)
    for at in range(0, len(edits) - 2, 3):
        position = int.from_bytes(edits[at : at + 2], "little")
        if position < len(found):
            found[position] ^= edits[at + 2]
    return bytes(found)


@target()
def tls_on_the_way(data: bytes) -> None:
    """Two ends with the secret, and an attacker between them who changes some bytes. The first
    byte chooses the flight: of the caller, of the listener, the caller's next, or its data."""

    def run() -> None:
        caller, listener = _stream(is_listener=False), _stream(is_listener=True)
        chosen, edits, said = data[0] % 4 if data else 0, data[1:], b"what was said" * 20
        turns = ((caller, listener), (listener, caller), (caller, listener), (caller, listener))
        for flight, (sender, receiver) in enumerate(turns):
            if flight == 3 and caller._is_open.done() and not caller._is_open.exception():
                caller.write(said)
            sent = b"".join(sender.transport.written)  # type: ignore[attr-defined]
            sender.transport.written.clear()  # type: ignore[attr-defined]
            _give(receiver, _changed(sent, edits) if flight == chosen else sent, 1 << 14)
        for one in (caller, listener):
            one.connection_lost(None)
            error = one._is_open.exception()
            assert error is None or isinstance(error, _REFUSED), repr(error)
        arrived = bytes(listener.reader._buffer)  # type: ignore[attr-defined]
        assert said.startswith(arrived), "changed data was accepted"
        if not any(edits):
            assert arrived == said

    _in_loop(run)
