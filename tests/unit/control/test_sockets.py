"""Listening and connecting: ports in use, addresses that do not exist, frames read to the byte."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from paceline.control.transport import sockets
from paceline.errors import BadFrame, ConnectError, PortInUse


def test_a_port_in_use_is_named_with_its_owner():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127.0.0.1:{port} is in use \(pid {os.getpid()} \w"):
            sockets.listen_tcp("127.0.0.1", port)


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(ConnectError, match=r"192.0.2.1:0: .*address of this host"):
        sockets.listen_tcp("192.0.2.1")


def test_a_name_that_does_not_exist_is_named():
    with pytest.raises(ConnectError, match="no-such-host.invalid"):
        sockets.listen_tcp("no-such-host.invalid")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses_survive_the_round_trip(host):
    assert sockets.split_address(sockets.join_address(host, 80)) == (host, 80)


def test_frames_are_read_to_the_byte():
    async def scenario():
        left, right = socket.socketpair()
        with left, right:
            left.setblocking(False)
            right.setblocking(False)
            await sockets.send_frame(left, b"hello")
            left.send(b"rest")
            assert await sockets.receive_frame(right) == b"hello"
            assert right.recv(100) == b"rest"

    asyncio.run(scenario())


def test_a_long_frame_is_refused_by_its_length_alone():
    assert sockets.frame_size((4096).to_bytes(4, "little"), 4096) == 4096
    with pytest.raises(BadFrame, match="frame of 4294967295 bytes announced, at most 4096"):
        sockets.frame_size(b"\xff" * 4, 4096)


def test_connecting_in_vain_counts_the_tries():
    async def refused():
        raise ConnectionRefusedError(111, "Connection refused")

    with pytest.raises(ConnectError, match=r"rank 3: Connection refused \(tried \d+x in 0.2 s\)"):
        asyncio.run(sockets.keep_trying(refused, what="rank 3", timeout_s=0.2))


def test_connecting_works_as_soon_as_somebody_listens():
    async def scenario():
        probe = socket.socket()  # holds the port against strangers, and does not listen
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        connecting = asyncio.ensure_future(
            sockets.keep_trying(
                lambda: sockets.connect_tcp(f"127.0.0.1:{port}"), what="late", timeout_s=60
            )
        )
        await asyncio.sleep(0.1)
        assert not connecting.done()
        listener = sockets.listen_tcp("127.0.0.1", port)
        (await connecting).close()
        listener.close()
        probe.close()

    asyncio.run(scenario())
