"""Encrypted control connections: what is on the wire, who gets in, and what is said when not."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import ssl
import subprocess
import sys

import msgspec
import pytest

from paceline.control.transport.acceptor import MAX_STRANGERS, Acceptor, introduce_control
from paceline.control.transport.auth import CallerHandshake
from paceline.control.transport.certificate import tls_contexts
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import (
    connect_tcp,
    frame,
    is_encrypted,
    join_address,
    listen_tcp,
)
from paceline.errors import AuthError, ConnectError

SECRET, OTHER, JOB = b"s" * 32, b"t" * 32, "j"
LISTENER = "door"
DECODER = msgspec.msgpack.Decoder(str)
DIFFERENT = "set PACELINE_ENCRYPT to the same value in every process of the job"


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setenv("PACELINE_ENCRYPT", "always")


class Door:
    """A listener, the channels that it admitted, and ways to call it."""

    def __init__(self, handshake_s: float = 30.0) -> None:
        self.admitted: asyncio.Queue[Channel[str]] = asyncio.Queue()
        self._channels: list[Channel[str]] = []
        self.acceptor = Acceptor(
            SECRET, job_id=JOB, listener=LISTENER, admit=self._admit, handshake_s=handshake_s
        )
        listener = listen_tcp("127.0.0.1")
        self.address = join_address(*listener.getsockname())
        self.acceptor.open(listener)

    async def close(self) -> None:
        for channel in self._channels:
            channel.close()
            with contextlib.suppress(OSError):
                await channel._writer.wait_closed()
        await self.acceptor.close()
        await asyncio.sleep(0)  # aborted connections are closed in the next round

    async def _channel(self, wire, session) -> Channel[str]:
        self._channels.append(await Channel.over(wire, session, DECODER))
        return self._channels[-1]

    async def _admit(self, wire, session, caller):
        await self.admitted.put(await self._channel(wire, session))

    async def honest(self, secret=SECRET, job_id=JOB) -> Channel[str]:
        handshake = CallerHandshake(
            secret, job_id=job_id, listener=LISTENER, role="worker", rank=0, purpose="control"
        )
        sock = await connect_tcp(self.address)
        wire, session = await introduce_control(sock, handshake, what="call")
        return await self._channel(wire, session)

    async def pair(self) -> tuple[Channel[str], Channel[str]]:
        return await self.honest(), await self.admitted.get()

    async def stranger(self, data: bytes = b"") -> socket.socket:
        sock = await connect_tcp(self.address)
        await asyncio.get_running_loop().sock_sendall(sock, data)
        return sock


def with_door(scenario, **options):
    async def run():
        door = Door(**options)
        try:
            return await asyncio.wait_for(scenario(door), 90)
        finally:
            await door.close()

    return asyncio.run(run())


async def hangs_up(sock: socket.socket) -> bytes:
    """Return all that the listener sends until it closes the connection."""
    loop, said = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionResetError):
        while data := await loop.sock_recv(sock, 1 << 16):
            said += data
    sock.close()
    return said


def client_hello(**options) -> bytes:
    """Return the first bytes of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, **options).do_handshake()
    return outgoing.read()


# -- certificate -----------------------------------------------------------------------------


def test_every_process_derives_the_same_certificate_and_another_secret_another_one():
    code = (
        "import hashlib; from paceline.control.transport.certificate import tls_contexts;"
        f"print(hashlib.sha256(tls_contexts({SECRET!r}).certificate).hexdigest())"
    )
    environ = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    here = tls_contexts(SECRET).certificate
    assert done.stdout.strip() == hashlib.sha256(here).hexdigest()
    assert tls_contexts(OTHER).certificate != here


def test_a_missing_package_is_named_with_what_to_do():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from paceline.control.transport.certificate import tls_contexts\n"
        "from paceline.errors import SetupError\n"
        "try: tls_contexts(bytes(32))\n"
        "except SetupError as error: print(error)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert "install the package `cryptography`, or set PACELINE_ENCRYPT=off" in done.stdout


@pytest.mark.parametrize(
    ("address", "setting", "expected"),
    [
        ("127.0.0.1", "on", False),
        ("127.8.0.1", "on", False),
        ("::1", "on", False),
        ("::ffff:127.0.0.1", "on", False),
        ("10.0.0.5", "on", True),
        ("fe80::1%eth0", "on", True),
        ("::ffff:10.0.0.5", "on", True),
        ("127.0.0.1", "always", True),
        ("10.0.0.5", "off", False),
    ],
)
def test_what_leaves_the_machine_is_encrypted(address, setting, expected):
    assert is_encrypted(socket.AF_INET, (address, 80), setting) is expected
    assert not is_encrypted(socket.AF_UNIX, "\0name", setting)


# -- messages --------------------------------------------------------------------------------


def test_messages_of_any_size_arrive_in_order_in_both_directions():
    sizes = [0, 1, 1 << 14, (1 << 18) + 1, 5 << 20]

    async def scenario(door):
        near, far = await door.pair()
        for sender, receiver in ((near, far), (far, near)):
            for size in sizes:
                sender.send("x" * size)
            assert [len(await receiver.receive()) for _ in sizes] == sizes
        await near.finish()

    with_door(scenario)


def test_last_messages_are_not_lost_although_the_peer_has_sent_what_nobody_reads():
    async def scenario(door):
        near, far = await door.pair()
        far.send("never read" * 50_000)
        for number in range(100):
            near.send(f"{number} " + "x" * 50_000)
        finishing = asyncio.ensure_future(near.finish())
        await asyncio.sleep(0.05)
        for number in range(100):
            assert (await far.receive()).startswith(f"{number} ")
        with pytest.raises(EOFError):
            await far.receive()
        far.close()
        await finishing

    with_door(scenario)


def test_after_the_peer_has_finished_it_can_still_be_answered():
    async def scenario(door):
        near, far = await door.pair()
        near._writer.write_eof()
        with pytest.raises(EOFError):
            await far.receive()
        far.send("the answer")
        assert await near.receive() == "the answer"

    with_door(scenario)


def test_a_broken_connection_is_an_end():
    async def scenario(door):
        near, far = await door.pair()
        near._writer.abort()
        with pytest.raises((EOFError, OSError)):
            await far.receive()
        far.send("to nobody")

    with_door(scenario)


def test_altered_bytes_end_the_connection():
    async def scenario(door):
        near, far = await door.pair()
        near._writer.transport.write(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(OSError):
            await far.receive()

    with_door(scenario)


# -- strangers -------------------------------------------------------------------------------


def test_another_secret_is_refused_in_the_words_of_the_plain_handshake(caplog):
    async def scenario(door):
        with pytest.raises(AuthError, match="^call: the process that listens there is not the"):
            await door.honest(secret=OTHER)
        await door.honest()  # the refusal is counted by now
        assert door.acceptor.refused == 1

    with caplog.at_level(logging.WARNING), to_caplog(caplog):
        with_door(scenario)
    assert "the peer has another secret" in caplog.text


def test_another_job_with_the_same_secret_is_refused():
    async def scenario(door):
        with pytest.raises(AuthError, match="is not the door of job other"):
            await door.honest(job_id="other")

    with_door(scenario)


@pytest.mark.parametrize("kind", ["no certificate", "own certificate", "TLS 1.2"])
def test_a_tls_client_without_the_secret_gets_nothing(kind):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kind == "own certificate":
        load_certificate(context, OTHER)
    if kind == "TLS 1.2":
        load_certificate(context, SECRET)
        context.maximum_version = ssl.TLSVersion.TLSv1_2

    def call(address: str) -> bytes:
        host, port = address.split(":")
        with (
            socket.create_connection((host, int(port)), timeout=30) as sock,
            context.wrap_socket(sock) as wrapped,
        ):
            wrapped.sendall(frame(b"hello"))
            return wrapped.recv(100)

    async def scenario(door):
        with pytest.raises((ssl.SSLError, ConnectionResetError, BrokenPipeError)):
            await asyncio.to_thread(call, door.address)
        await door.honest()
        assert door.acceptor.refused == 1 and door.admitted.qsize() == 1

    with_door(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frame(b"\x85"),
        b"\x00",
        b"\x16",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
        b"\x16\x03\x01\xff\xff" + bytes(100),
        b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(1 << 14),
        b"\x16\x03\x01" + os.urandom(200_000),
    ],
    ids=["http", "plain", "zero", "one byte", "bad hello", "long", "too much", "noise"],
)
def test_bytes_that_no_member_would_send_end_the_connection(data):
    async def scenario(door):
        sock = await door.stranger(data)
        sock.shutdown(socket.SHUT_WR)
        assert len(await hangs_up(sock)) <= 7  # an alert at most
        await door.honest()
        assert door.acceptor.refused == 1

    with_door(scenario)


def test_slow_and_idle_strangers_end_with_the_deadline_and_delay_nobody():
    async def drip(sock):
        loop = asyncio.get_running_loop()
        for byte in client_hello():
            await loop.sock_sendall(sock, bytes([byte]))
            await asyncio.sleep(0.05)

    async def scenario(door):
        silent, slow = await door.stranger(), await door.stranger()
        half = await door.stranger(client_hello())  # it never goes on after our answer
        dripping = asyncio.ensure_future(drip(slow))
        await door.honest()
        assert await hangs_up(silent) == b""
        assert len(await hangs_up(half)) < 4096
        with pytest.raises(OSError):
            await dripping
        slow.close()
        assert door.acceptor.refused == 3

    with_door(scenario, handshake_s=2.0)


def test_a_crowd_of_strangers_does_not_keep_members_out():
    async def scenario(door):
        hello = client_hello()
        crowd = [await door.stranger(hello) for _ in range(3 * MAX_STRANGERS)]
        for _ in range(5):
            await door.honest()
        assert len(door.acceptor._strangers) <= MAX_STRANGERS
        for sock in crowd:
            sock.close()

    with_door(scenario)


# -- one side is not encrypted ---------------------------------------------------------------


def test_a_plain_caller_and_a_tls_listener_both_say_what_to_check(monkeypatch, caplog):
    async def scenario(door):
        monkeypatch.setenv("PACELINE_ENCRYPT", "off")
        with pytest.raises(ConnectError, match=f"^call: the peer speaks TLS.*{DIFFERENT}"):
            await door.honest()

    with caplog.at_level(logging.WARNING), to_caplog(caplog):
        with_door(scenario)
    assert "a caller does not speak TLS" in caplog.text and DIFFERENT in caplog.text


def test_a_tls_caller_and_a_plain_listener_both_say_what_to_check(monkeypatch, caplog):
    async def scenario(door):
        monkeypatch.setenv("PACELINE_ENCRYPT", "always")
        with pytest.raises(ConnectError, match=f"^call: the peer does not speak TLS.*{DIFFERENT}"):
            await door.honest()

    monkeypatch.setenv("PACELINE_ENCRYPT", "off")
    with caplog.at_level(logging.WARNING), to_caplog(caplog):
        with_door(scenario)
    assert "the peer speaks TLS" in caplog.text and DIFFERENT in caplog.text


@contextlib.contextmanager
def to_caplog(caplog):
    """Paceline's logger does not propagate: pass its records to the fixture."""
    logger = logging.getLogger("paceline")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def load_certificate(context: ssl.SSLContext, secret: bytes) -> None:
    """Let a stranger present the certificate of another secret."""
    from paceline.control.transport.certificate import _derive

    with open(os.memfd_create("key"), "wb") as file:
        file.write("".join(_derive(secret)).encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
