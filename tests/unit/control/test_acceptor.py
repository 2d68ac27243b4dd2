"""Strangers get 4 KiB, a few seconds and 64 places, and can neither get in nor hold up others."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest

from paceline.control.transport import acceptor as acceptor_module
from paceline.control.transport.acceptor import MAX_STRANGERS, Acceptor, introduce
from paceline.control.transport.auth import CallerHandshake
from paceline.control.transport.sockets import connect_tcp, frame, join_address, listen_tcp
from paceline.control.transport.tls import ALERT
from paceline.errors import AuthError, VersionMismatch

SECRET, JOB = b"s" * 32, "j"


class Door:
    """A gate on a port, the callers that it admitted, and ways to knock."""

    def __init__(self, handshake_s: float = 5.0) -> None:
        self.admitted = []
        self.gate = Acceptor(
            SECRET, job_id=JOB, listener="door", admit=self._admit, handshake_s=handshake_s
        )
        listener = listen_tcp("127.0.0.1")
        self.address = join_address(*listener.getsockname())
        self.gate.open(listener)

    async def _admit(self, sock, session, caller):
        self.admitted.append(caller)
        sock.close()

    async def honest(self, secret=SECRET):
        handshake = CallerHandshake(
            secret, job_id=JOB, listener="door", role="worker", rank=len(self.admitted), purpose="p"
        )
        sock = await connect_tcp(self.address)
        await introduce(sock, handshake, what="door")
        sock.close()

    async def stranger(self, data: bytes = b"") -> socket.socket:
        sock = await connect_tcp(self.address)
        await asyncio.get_running_loop().sock_sendall(sock, data)
        return sock


def with_door(scenario, **options):
    async def run():
        door = Door(**options)
        try:
            await asyncio.wait_for(scenario(door), 90)
        finally:
            await door.gate.close()

    asyncio.run(run())


async def hangs_up(sock: socket.socket) -> bytes:
    """Everything that the gate says until it hangs up."""
    loop, said = asyncio.get_running_loop(), b""
    try:
        while data := await loop.sock_recv(sock, 4096):
            said += data
    except ConnectionResetError:
        pass  # we had sent more than it wanted to read
    sock.close()
    return said


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frame(b""),
        frame(b"\xc1"),
        frame(bytes(4096)),
        (4097).to_bytes(4, "little"),
        b"\xff" * 64,
    ],
    ids=["http", "empty", "garbage", "zeros", "oversize", "ones"],
)
def test_bytes_that_no_member_would_send_end_the_connection_at_once(data):
    async def scenario(door):
        assert await hangs_up(await door.stranger(data)) == b""
        assert door.gate.refused == 1
        await door.honest()
        assert [caller.rank for caller in door.admitted] == [0]

    with_door(scenario)


def test_tls_at_a_plain_port_gets_an_alert_and_nothing_else():
    async def scenario(door):
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)
        assert await hangs_up(await door.stranger(hello)) in (ALERT, b"")  # b"": reset on our side
        await door.honest()
        assert door.gate.refused == 1

    with_door(scenario)


def test_silence_and_dripping_end_with_the_deadline():
    async def drip(sock):
        loop = asyncio.get_running_loop()
        for byte in frame(bytes(4000)):
            await loop.sock_sendall(sock, bytes([byte]))
            await asyncio.sleep(0.02)

    async def scenario(door):
        silent, slow = await door.stranger(), await door.stranger()
        dripping = asyncio.ensure_future(drip(slow))
        await door.honest()  # neither of them is in the way
        assert await hangs_up(silent) == b""
        with pytest.raises(OSError):
            await dripping
        slow.close()
        assert (door.gate.refused, len(door.admitted)) == (2, 1)

    with_door(scenario, handshake_s=1.0)  # enough for the honest one


def test_half_a_frame_and_then_nothing_is_no_member():
    async def scenario(door):
        sock = await door.stranger((100).to_bytes(4, "little") + b"x" * 50)
        sock.shutdown(socket.SHUT_WR)
        assert await hangs_up(sock) == b""

    with_door(scenario)


def test_a_crowd_of_idle_strangers_does_not_keep_members_out():
    async def scenario(door):
        crowd = [await door.stranger() for _ in range(3 * MAX_STRANGERS)]
        for _ in range(5):
            await door.honest()
        assert len(door.admitted) == 5
        assert len(door.gate._strangers) <= MAX_STRANGERS
        assert door.gate.refused == 0  # pushed out to make room, long before any deadline
        for sock in crowd:
            sock.close()

    with_door(scenario)


def test_a_wrong_secret_is_told_nothing_by_the_gate():
    async def scenario(door):
        with pytest.raises(AuthError, match="^door: the process that listens there"):
            await door.honest(secret=b"t" * 32)
        assert door.admitted == []

    with_door(scenario)


def test_another_version_is_told_ours_and_refused(monkeypatch):

    async def scenario(door):
        hello = CallerHandshake(
            SECRET, job_id=JOB, listener="door", role="worker", rank=0, purpose="p"
        ).hello()
        other = hello.replace(b"\xa7version\x01", b"\xa7version\x07")
        assert other != hello
        sock = await door.stranger(frame(other))
        answer = await hangs_up(sock)
        assert b"\xa7version\x01" in answer
        assert door.admitted == []

    with_door(scenario)


def test_a_caller_learns_of_another_version(monkeypatch):
    async def scenario():
        async def old_server(reader, writer):
            await reader.read(4096)
            writer.write(frame(b"\x81\xa7version\x00"))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(old_server, "127.0.0.1", 0)
        address = join_address(*server.sockets[0].getsockname())
        handshake = CallerHandshake(
            SECRET, job_id=JOB, listener="door", role="worker", rank=0, purpose="p"
        )
        with pytest.raises(VersionMismatch, match="old: protocol 0 there, 1 here"):
            await introduce(await connect_tcp(address), handshake, what="old")
        server.close()

    asyncio.run(scenario())


def test_mutated_handshakes_never_get_in():
    rng = random.Random(2)

    async def scenario(door):
        for _ in range(60):
            handshake = CallerHandshake(
                SECRET, job_id=JOB, listener="door", role="worker", rank=0, purpose="p"
            )
            data = bytearray(frame(handshake.hello()) + frame(rng.randbytes(40)))
            for _ in range(rng.randrange(3)):
                data[rng.randrange(4, len(data))] = rng.randrange(256)
            sock = await door.stranger(bytes(data[: rng.randrange(1, len(data) + 1)]))
            sock.shutdown(socket.SHUT_WR)
            await hangs_up(sock)
        assert door.admitted == []
        await door.honest()
        assert len(door.admitted) == 1

    with_door(scenario)


def test_refusals_are_logged_sparsely(caplog):
    async def scenario(door):
        for _ in range(20):
            await hangs_up(await door.stranger(b"\xff" * 8))

    with caplog.at_level("WARNING", logger=acceptor_module.log.name):
        with_door(scenario)
    assert [record.args[1] for record in caplog.records] == [1, 2, 4, 8, 16]


def test_closing_ends_everything_at_once():
    async def scenario(door):
        sock = await door.stranger()
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await door.gate.close()
        assert await hangs_up(sock) == b""
        assert time.monotonic() - start < 30  # it did not wait for the handshake's deadline
        with pytest.raises(OSError):
            await connect_tcp(door.address)

    with_door(scenario, handshake_s=60.0)
