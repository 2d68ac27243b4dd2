"""Writes what a process decodes to FUZZ_TAP: record.py puts this file on the path of running jobs.

Decoders of msgspec are replaced by ones that first write their input, and links to other hosts by a
pair of sockets with a thread between them that writes what arrives.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import threading
from pathlib import Path

import msgspec

_MOST = 40  # of each kind and process
_counts: dict[str, int] = {}
_number = itertools.count()


def keep(kind: str, data: bytes) -> None:
    """Write an input, if there are not many of its kind yet."""
    _counts[kind] = _counts.get(kind, 0) + 1
    if _counts[kind] <= _MOST and len(data) < 4096:
        directory = Path(os.environ["FUZZ_TAP"], hashlib.sha256(kind.encode()).hexdigest()[:12])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "KIND").write_text(kind)
        (directory / f"{os.getpid()}-{next(_number)}").write_bytes(data)


def _tapped(module: object, name: str) -> None:
    decoder, decode = module.Decoder, module.decode  # type: ignore[attr-defined]

    class Decoder:
        def __init__(self, type: object = object, **options: object) -> None:
            self._kind = f"{name} {type}"
            self._decoder = decoder(type, **options)

        def decode(self, data: bytes) -> object:
            keep(self._kind, bytes(data))
            return self._decoder.decode(data)

    def decode_once(data: bytes, **options: object) -> object:
        keep(
            f"{name} {options.get('type')}", data.encode() if isinstance(data, str) else bytes(data)
        )
        return decode(data, **options)

    module.Decoder, module.decode = Decoder, decode_once  # type: ignore[attr-defined]


def _tap_links() -> None:
    from paceline.control.transport.peer_connections import LinkListener

    connect = LinkListener.connect

    def tapped(self: object, member: object, purpose: str, local: bool, *rest: float) -> int:
        fd = connect(self, member, purpose, local, *rest)  # type: ignore[arg-type]
        if local:
            return fd
        far = socket.socket(fileno=fd)
        far.setblocking(True)
        ours, engines = socket.socketpair()
        for source, sink in ((far, ours), (ours, far)):
            threading.Thread(target=_pump, args=(purpose, source, sink), daemon=True).start()
        return engines.detach()

    LinkListener.connect = tapped  # type: ignore[method-assign,assignment]


def _pump(purpose: str, source: socket.socket, sink: socket.socket) -> None:
    stream = b""
    while data := source.recv(1 << 16):
        stream += data[: 4000 - min(len(stream), 4000)]
        sink.sendall(data)
    keep("engine stream", stream)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


if "FUZZ_TAP" in os.environ:
    _tapped(msgspec.msgpack, "msgpack")
    _tapped(msgspec.json, "json")
    if "FUZZ_TAP_LINKS" in os.environ:
        _tap_links()
