"""A proxy between members and their coordinator looks at every byte of their connection."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from paceline.control.client.agent import Agent
from paceline.control.client.operator import Operator
from paceline.control.transport.sockets import join_address, split_address
from paceline.errors import AuthError, ConnectError

KEY, VALUE = "a key that is easy to find", b"a value that is easy to find"


class Wiretap:
    """Forwards connections to an address, and keeps what each direction carried."""

    def __init__(self, address: str) -> None:
        self._to = split_address(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address(*self._listener.getsockname())
        self.heard: list[bytes] = []  # one entry for each piece, in any order of directions
        self._ends: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def all(self) -> bytes:
        return b"".join(self.heard)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def tapped(cluster, monkeypatch):
    """Start a coordinator with a setting of PACELINE_ENCRYPT; return the wiretap on it."""
    with contextlib.ExitStack() as stack:

        def start(setting: str) -> Wiretap:
            monkeypatch.setenv("PACELINE_ENCRYPT", setting)
            tap = Wiretap(cluster.start(1).address)
            stack.callback(tap.close)
            return tap

        yield start


def exchange(tap: Wiretap, secret: bytes, job_id: str, make_member) -> None:
    agent = Agent.connect(tap.address, secret, job_id, 0)
    try:
        agent.join(make_member(0, hostname="a host that is easy to find"))
        agent.store_set(KEY, VALUE)
        assert agent.store_get(KEY, 10) == VALUE
        operator = Operator.connect(tap.address, secret, job_id, timeout_s=10)
        assert operator.status().membership is not None
        operator.close()
    finally:
        agent.close()


def test_members_and_operators_send_nothing_in_the_clear(tapped, secret, job_id, make_member):
    tap = tapped("always")
    exchange(tap, secret, job_id, make_member)
    assert tap.heard[0][:2] == b"\x16\x03" and len(tap.all) > 2000
    for plain in (KEY.encode(), VALUE, b"easy to find", b"operator", b"version", b"Heartbeat"):
        assert plain not in tap.all


@pytest.mark.parametrize("setting", ["off", "on"])
def test_the_same_exchange_is_readable_if_off_and_on_loopback(
    tapped, secret, job_id, make_member, setting
):
    tap = tapped(setting)
    exchange(tap, secret, job_id, make_member)
    for plain in (KEY.encode(), VALUE, b"easy to find", b"operator", b"version", b"Heartbeat"):
        assert plain in tap.all


def test_a_member_with_another_secret_is_refused_at_once(tapped, job_id):
    tap = tapped("always")
    with pytest.raises(AuthError, match="is not the coordinator of job job-1 with our secret"):
        Agent.connect(tap.address, b"another secret, also 32 bytes...", job_id, 0, timeout_s=60)


@pytest.mark.parametrize(("there", "here"), [("always", "off"), ("off", "always")])
def test_different_settings_are_named_at_once(tapped, secret, job_id, monkeypatch, there, here):
    tap = tapped(there)
    monkeypatch.setenv("PACELINE_ENCRYPT", here)
    with pytest.raises(ConnectError, match="rank 0: coordinator .* set PACELINE_ENCRYPT to the"):
        Agent.connect(tap.address, secret, job_id, 0, timeout_s=60)


def test_connections_that_stay_on_the_machine_import_no_cryptography():
    code = """
import sys
from paceline.control.client.agent import Agent
from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
thread = CoordinatorThread(Coordinator("j", bytes(32), 1))
agent = Agent.connect(thread.start(), bytes(32), "j", 0)
agent.store_set("a", b"b")
agent.close()
thread.stop()
print("cryptography" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
