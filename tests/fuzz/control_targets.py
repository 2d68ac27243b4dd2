"""Targets of the control plane: what a listener, the coordinator, a member and an operator read."""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec

from fuzz.target import target
from paceline.control import messages as m
from paceline.control import operator_messages as o
from paceline.control.client import agent, operator
from paceline.control.coordinator import coordinator as coordinating
from paceline.control.coordinator import journal, operator_service
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.coordinator.member_connections import MemberConnection
from paceline.control.coordinator.operator_service import OperatorConnection
from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.transport.auth import (
    CallerHandshake,
    Hello,
    ListenerHandshake,
    Session,
)
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import frame
from paceline.errors import BadFrame, PacelineError

SECRET = bytes(range(32))
_KEY = b"k" * 32
_loop = asyncio.new_event_loop()


class Wire:
    """Stands for asyncio's writer: it takes everything, and nobody reads it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_closed = False

    @property
    def transport(self) -> Wire:
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)

    def close(self) -> None:
        self.is_closed = True


def channel_of(stream: bytes, decoder: Any) -> Channel[Any]:
    """Return a channel on which this arrives, and then its end."""
    reader = asyncio.StreamReader(loop=_loop)
    reader.feed_data(stream)
    reader.feed_eof()
    return Channel(reader, Wire(), Session(_KEY, _KEY), decoder)  # type: ignore[arg-type]


@target(PacelineError, form="msgpack")
def listener_handshake(data: bytes) -> None:
    handshake = ListenerHandshake(SECRET, job_id="job", listener="rank 1")
    handshake.challenge(data)
    handshake.require_version()
    handshake.accept(data)


@target(PacelineError)
def proof_of_a_caller(data: bytes) -> None:
    caller = CallerHandshake(
        SECRET, job_id="job", listener="rank 1", role="worker", rank=0, purpose="control"
    )
    handshake = ListenerHandshake(SECRET, job_id="job", listener="rank 1")
    handshake.challenge(caller.hello())
    handshake.accept(data)
    raise AssertionError("a caller was accepted that did not prove anything")


@target(PacelineError, form="msgpack")
def caller_handshake(data: bytes) -> None:
    handshake = CallerHandshake(
        SECRET, job_id="job", listener="rank 1", role="worker", rank=0, purpose="control"
    )
    handshake.answer(data)
    raise AssertionError("a listener was accepted that did not prove anything")


@target(PacelineError, EOFError)
def control_stream(data: bytes) -> None:
    """Without the key: no byte of it may become a message."""
    channel = channel_of(data, coordinating._decoder)
    _loop.run_until_complete(channel.receive())
    raise AssertionError("a frame without a valid tag was accepted")


def receive_all(messages: list[bytes], decoder: Any) -> list[Any]:
    """Send these over a channel with the key, and return what arrives."""
    sender = Session(_KEY, _KEY)
    channel = channel_of(b"".join(frame(sender.seal(one)) for one in messages), decoder)

    async def read() -> list[Any]:
        return [await channel.receive() for _ in messages]

    return _loop.run_until_complete(read())


@target(PacelineError, form="msgpack")
def message_to_member(data: bytes) -> None:
    [message] = receive_all([data], agent._decoder)
    assert receive_all([msgspec.msgpack.encode(message)], agent._decoder)


@target(PacelineError, form="msgpack")
def message_to_operator(data: bytes) -> None:
    [message] = receive_all([data], operator._decoder)
    assert receive_all([msgspec.msgpack.encode(message)], operator._decoder)


def _member(rank: int, role: str, number: int) -> Member:
    return Member(rank, role, "host-0", "host", 1000 + rank, rank, f"unix-{rank}", "", number)


MEMBERS = (_member(0, "worker", 0), _member(1, "worker", 1), _member(2, "server", 0))
_FIXED = Policy.fixed(3, 5.0)
_ELASTIC = Policy(num_workers=2, num_servers=1, is_elastic=True, max_workers=6, max_servers=4)


class Served:
    """A coordinator whose members have joined, with a newcomer, a launcher and an operator."""

    def __init__(self, policy: Policy) -> None:
        self.coordinator = Coordinator("job", SECRET, 3, policy=policy)
        self.connections: list[MemberConnection | OperatorConnection] = []
        for rank, role in ((0, "worker"), (1, "worker"), (2, "server"), (3, "worker")):
            hello = Hello(1, role, rank, "control", bytes(32))
            one = MemberConnection(channel_of(b"", coordinating._decoder), hello)
            self.coordinator._members.all.add(one)
            self.connections.append(one)
        for member, connection in zip(MEMBERS, self.connections, strict=False):
            self.coordinator._on_message(connection, m.Join(1, member, 5.0))  # type: ignore[arg-type]
        for is_launcher in (True, False):
            hello = Hello(1, o.ROLE, 0, "control", bytes(32))
            told = OperatorConnection(channel_of(b"", operator_service.decoder), hello)
            self.connections.append(told)
            self.coordinator._operators._operators.add(told)
            self.coordinator._operators._on_message(told, o.Watch(1, is_launcher))

    def hear(self, who: int, data: bytes) -> None:
        """Handle one message as the task of its connection does."""
        connection = self.connections[who % len(self.connections)]
        if connection.channel._writer.is_closed:  # type: ignore[attr-defined]
            return
        is_member = isinstance(connection, MemberConnection)
        decoder = coordinating._decoder if is_member else operator_service.decoder
        try:
            [message] = _decoded(data, decoder)
            if isinstance(connection, MemberConnection):
                self.coordinator._on_message(connection, message)
                if connection.farewell is None:
                    return
            elif not isinstance(message, m.Leave):
                self.coordinator._operators._on_message(connection, message)
                return
        except PacelineError:
            pass
        connection.channel.close()
        if isinstance(connection, MemberConnection):
            self.coordinator._members.all.discard(connection)
            self.coordinator._dismiss(connection, "it was refused")

    def tick(self) -> None:
        """Do what the coordinator does several times a second."""
        if self.coordinator.membership is not None:
            self.coordinator.carry_out(self.coordinator.roster.tick(_loop.time()))


def _decoded(data: bytes, decoder: Any) -> list[Any]:
    try:
        return [decoder.decode(data)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from None


def _serve(data: bytes, policy: Policy) -> None:
    """Serve a story: a list of [connection, message]."""
    try:
        story = msgspec.msgpack.decode(data, type=list[tuple[int, msgspec.Raw]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return

    async def run() -> None:
        served = Served(policy)
        for who, message in story[:64]:
            served.hear(who, bytes(message))
        served.tick()
        await asyncio.sleep(0)
        for connection in served.connections:
            if isinstance(connection, MemberConnection):
                for cancel in list(connection.waits.values()):
                    cancel()

    _loop.run_until_complete(run())


@target(form="msgpack")
def coordinator(data: bytes) -> None:
    _serve(data, _FIXED)


@target(form="msgpack")
def elastic_coordinator(data: bytes) -> None:
    _serve(data, _ELASTIC)


def _repaired(data: bytes) -> bytes:
    """Make the lengths and checksums of a journal right where entries begin."""
    found, at = b"", 0
    while at + 8 <= len(data):
        length = struct.unpack_from("<I", data, at)[0] % 4096
        payload = data[at + 8 : at + 8 + length]
        found += struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
        at += 8 + len(payload)
    return found


@target(PacelineError)
def coordinator_journal(data: bytes) -> None:
    fd = os.memfd_create("journal")
    try:
        os.write(fd, data[1:] if data[:1] == b"\0" else _repaired(data[1:]))
        os.lseek(fd, 0, os.SEEK_SET)
        entries, size = journal._replay(fd, Path("journal"))
    finally:
        os.close(fd)
    assert size <= len(data)
    _resume(entries)


@target(PacelineError, form="msgpack")
def journal_entry(data: bytes) -> None:
    try:
        entry = journal._decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    _resume([entry])


def _resume(entries: list[Any]) -> None:
    """Let a coordinator begin with these."""

    class Replayed:
        def __init__(self) -> None:
            self.entries = list(entries)

        def append(self, entry: object, *, sync: bool = True) -> None: ...

    Coordinator("job", SECRET, 3, policy=_ELASTIC, journal=Replayed())  # type: ignore[arg-type]
