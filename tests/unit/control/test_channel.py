"""Control frames: typed messages arrive, anything else ends that connection and no other."""

from __future__ import annotations

import asyncio
import random
import socket

import msgspec
import pytest

from paceline.control import messages as m
from paceline.control.transport import channel as channel_module
from paceline.control.transport.acceptor import introduce
from paceline.control.transport.auth import CallerHandshake, Session
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import MAX_FRAME_BYTES, connect_tcp, frame
from paceline.errors import AuthError, BadFrame, PeerLost

KEYS = (b"a" * 32, b"b" * 32)
DECODER = msgspec.msgpack.Decoder(m.MemberMessage)


def run(scenario):
    """Run with a channel, and the raw socket and session of its other end."""

    async def go():
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        channel = await Channel.over(near, Session(*KEYS), DECODER)
        with far:
            await asyncio.wait_for(scenario(channel, far, Session(*reversed(KEYS))), 30)
        await channel.finish()

    asyncio.run(go())


def sealed(session: Session, message) -> bytes:
    return frame(session.seal(msgspec.msgpack.encode(message)))


@pytest.mark.parametrize(
    "message",
    [
        m.Heartbeat(),
        m.StoreSet(1, "key", b"\x00value"),
        m.StoreWait(2, ("a", "b"), 1.5),
        m.StoreNumKeys(3),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive_as_they_were_sent(message):
    async def scenario(channel, far, session):
        far.sendall(sealed(session, message))
        assert await channel.receive() == message

    run(scenario)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda s: frame(Session(*KEYS).seal(b"reflected")), AuthError),
        (lambda s: sealed(s, m.Heartbeat())[:-1] + b"\x00", AuthError),
        (lambda s: frame(b"short"), BadFrame),
        (lambda s: (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), BadFrame),
        (lambda s: frame(s.seal(b"\xc1")), BadFrame),
        (lambda s: frame(s.seal(b"")), BadFrame),
        (lambda s: sealed(s, {"type": "Explode"}), BadFrame),
        (lambda s: sealed(s, {"type": "StoreSet", "id": 1, "key": 5, "value": b""}), BadFrame),
        (lambda s: sealed(s, m.Reply(1, None)), BadFrame),
    ],
    ids=["reflected", "flipped", "short", "oversize", "no msgpack", "empty", "unknown kind",
         "wrong type", "wrong direction"],
)  # fmt: skip
def test_what_is_not_an_expected_message_is_refused(bad, error):
    async def scenario(channel, far, session):
        far.sendall(bad(session))
        with pytest.raises(error):
            await channel.receive()

    run(scenario)


def test_an_end_in_the_middle_of_a_frame_is_an_end():
    async def scenario(channel, far, session):
        far.sendall(sealed(session, m.Heartbeat())[:-3])
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            await channel.receive()

    run(scenario)


def test_a_peer_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(channel_module, "MAX_BACKLOG_BYTES", 1 << 20)

    async def scenario(channel, far, session):
        with pytest.raises(PeerLost, match="does not read"):
            for _ in range(100):
                channel.send(m.StoreSet(1, "k", bytes(1 << 18)))
        far.close()

    run(scenario)


def test_garbage_from_a_member_costs_only_its_own_connection(cluster, secret, job_id):
    """A5: a peer that knows the secret and then sends anything at all."""
    good = cluster.start(2).agent(0)
    rng = random.Random(4)

    async def misbehave():
        for _ in range(30):
            handshake = CallerHandshake(
                secret, job_id=job_id, listener="coordinator", role="worker", rank=1,
                purpose="control",
            )  # fmt: skip
            sock = await connect_tcp(cluster.address)
            session = await introduce(sock, handshake, what="coordinator")
            payload = rng.randbytes(rng.randrange(60))
            sock.setblocking(True)
            sock.sendall(frame(session.seal(payload) if rng.random() < 0.7 else payload))
            sock.settimeout(10)
            assert sock.recv(10) == b""
            sock.close()

    asyncio.run(misbehave())
    assert good.store_add("n", 1) == 1
    assert cluster.coordinator.missing == (0, 1)
