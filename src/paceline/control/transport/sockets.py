"""Sockets of the control plane: listening, connecting with retries, and frames read to the byte.

Frames are a 4-byte little-endian length and that many bytes. They are read with exact sizes and
never ahead, because a link's descriptor goes to the C++ core afterwards: a byte too many would be
lost to it. All sockets are non-blocking and close-on-exec; all functions run in an asyncio loop.

Sockets must not stay open in forked children (`close_in_children`). A data loader forks workers out
of a training process: such a child would keep the parent's connections and ports open after the
parent was killed, and its loss would not be noticed. Programs started with exec are no problem:
Python's descriptors are close-on-exec.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.errors import BadFrame, ConnectError, PortInUse, SetupError

MAX_HELLO_BYTES = 4096  # any frame before authentication
MAX_FRAME_BYTES = 64 << 20  # any frame after it
DEAD_AFTER_S = 1.5  # without an acknowledgement, a machine or its network is gone
_BACKLOG = 1024
_ATTEMPT_S = 5.0
_TCP_RTO_MAX_MS = 44  # not in the socket module yet
_TLS_RECORDS = (0x15, 0x16)  # alert, handshake

T = TypeVar("T")


class Stream(Protocol):
    """An encrypted connection, as far as frames need it; see tls.py."""

    async def read_exactly(self, size: int) -> bytes: ...
    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...


class SocketOptions(Protocol):
    """A socket, or what asyncio shows of it."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def frame_size(header: bytes, limit: int) -> int:
    """Return a frame's length; BadFrame before anything is allocated if it exceeds the limit."""
    size = int.from_bytes(header, "little")
    if size > limit:
        raise BadFrame(f"frame of {size} bytes announced, at most {limit} allowed")
    return size


async def send_frame(sock: socket.socket | Stream, payload: bytes) -> None:
    if isinstance(sock, socket.socket):
        await asyncio.get_running_loop().sock_sendall(sock, frame(payload))
    else:
        sock.write(frame(payload))


async def receive_frame(sock: socket.socket | Stream, limit: int = MAX_HELLO_BYTES) -> bytes:
    """Read one frame and not a byte more; ConnectionError if the peer closes before its end."""
    header = await _receive(sock, 4)
    if header[0] in _TLS_RECORDS and header[1] == 3:  # as a length it would exceed the limit
        raise ConnectError(
            "the peer speaks TLS, but this connection is not encrypted here; set PACELINE_ENCRYPT"
            " to the same value in every process of the job"
        )
    return await _receive(sock, frame_size(header, limit))


async def _receive(sock: socket.socket | Stream, size: int) -> bytes:
    if not isinstance(sock, socket.socket):
        return await sock.read_exactly(size)
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return data


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_encrypted(family: int, listener: Any, setting: str) -> bool:
    """Return whether connections to a listener at this socket address are encrypted.

    `setting`: a value of PACELINE_ENCRYPT.
    """
    if family == socket.AF_UNIX or setting == "off":
        return False
    return setting == "always" or leaves_machine(listener[0])


def leaves_machine(host: str) -> bool:
    """Return whether connections to this IP address can leave the machine."""
    ip = ipaddress.ip_address(host.partition("%")[0])  # fe80::1%eth0
    return not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """Listen on one address; PortInUse names the process that has the port, if /proc shows it."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConnectError(f"cannot listen on {host}: {error.strerror}; check the name") from error
    sock = close_in_children(socket.socket(family, kind))
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        retry_soon(sock)  # accepted ones inherit it
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _listen_error(error, host, port) from error
    return sock


def listen_unix(name: str) -> socket.socket:
    """Listen on an abstract Unix socket: no file, gone with the process."""
    sock = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.setblocking(False)
    sock.bind("\0" + name)
    sock.listen(_BACKLOG)
    return sock


def _listen_error(error: OSError, host: str, port: int) -> SetupError:
    address = join_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return PortInUse(f"{address} is in use{_port_owner(port)}; choose another port")
    if error.errno == errno.EACCES:
        return PortInUse(f"{address} needs privileges (ports below 1024); choose a higher port")
    return ConnectError(
        f"cannot listen on {address}: {error.strerror}; give an address of this host"
    )


def _port_owner(port: int) -> str:
    """Return ' (pid 4242 python)' for the process that listens on a port, '' when hidden."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                field = line.split()
                if field[3] == "0A" and int(field[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{field[9]}]")
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # The process may have ended meanwhile, or belong to another user.
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in inodes:
                process = descriptor.parent.parent
                return f" (pid {process.name} {(process / 'comm').read_text().strip()})"
    return ""


async def connect_tcp(address: str) -> socket.socket:
    """Connect once, to the first of the host's addresses that answers; OSError when none does."""
    host, port = split_address(address)
    failure = OSError(f"{host} has no address")
    for family, where in await _resolve(host, port):
        try:
            sock = await _connect(family, where)
        except OSError as error:
            failure = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        retry_soon(sock)
        return sock
    raise failure


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """Return the family and socket address of each address of a host; raises OSError."""
    kind = socket.SOCK_STREAM
    try:  # an address in digits needs no name server, and so no thread to ask one
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=kind)
    return [(family, where) for family, _, _, _, where in found]


def retry_soon(sock: socket.socket) -> None:
    """Let TCP retry every second after an interruption, not at ever longer intervals.

    After a network outage of 3 s the next retry would be 3 s later, when the member is already
    taken for lost. On kernels without TCP_RTO_MAX_MS (before Linux 6.15) it takes longer.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


def die_soon(sock: SocketOptions, within_s: float = DEAD_AFTER_S) -> None:
    """End a connection whose peer's machine or network is gone for this long.

    It takes regular messages in both directions. A process that is merely stopped does not end its
    connection: its kernel still acknowledges.
    """
    with contextlib.suppress(OSError):  # a Unix socket, or a kernel without it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(within_s * 1000))


async def connect_unix(name: str) -> socket.socket:
    """Connect once to an abstract Unix socket; OSError when that fails."""
    return await _connect(socket.AF_UNIX, "\0" + name)


async def _connect(family: int, where: Any) -> socket.socket:
    sock = close_in_children(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


async def keep_trying(attempt: Callable[[], Awaitable[T]], *, what: str, timeout_s: float) -> T:
    """Repeat an attempt to connect until it works; ConnectError counts the tries.

    A refused or dropped connection is ordinary at the start of a job: the other side may not listen
    yet, or may be flooded by unauthenticated connections for a moment.
    """
    deadline = time.monotonic() + timeout_s
    tries, pause_s = 0, 0.02
    while True:
        tries += 1
        remaining_s = max(deadline - time.monotonic(), 0.01)
        try:
            return await asyncio.wait_for(attempt(), min(remaining_s, _ATTEMPT_S))
        except asyncio.TimeoutError:
            reason = "no answer"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + pause_s >= deadline:
            raise ConnectError(
                f"{what}: {reason} (tried {tries}x in {timeout_s:g} s);"
                " check that it runs, its address and the network between"
            )
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.5)


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the peer of a non-blocking socket has closed it, and has left nothing to
    read."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> socket.socket:
    """Close this socket in every child that is forked while it is open; return the socket."""
    _sockets.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_all)
