"""Which links are encrypted, that both ends must agree, and that every connection has new keys."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from paceline import _core
from paceline.control.transport.link_encryption import (
    CIPHERS,
    Link,
    split_cipher,
    with_cipher,
)
from paceline.control.transport.peer_connections import LinkListener
from paceline.control.transport.sockets import is_encrypted
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "leaves"),
    [
        ("127.0.0.1", False),
        ("127.8.9.1", False),
        ("10.0.0.7", True),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.7", True),
        ("fe80::1%eth0", True),
        ("2001:db8::1", True),
    ],
)
def test_links_that_leave_the_machine_are_encrypted(address, leaves):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    where = (address, 4711)
    assert is_encrypted(family, where, "on") == leaves
    assert is_encrypted(family, where, "always")
    assert not is_encrypted(family, where, "off")


def test_unix_sockets_are_never_encrypted():
    for setting in ("on", "always", "off"):
        assert not is_encrypted(socket.AF_UNIX, "\0name", setting)


def test_the_ciphers_are_those_of_the_core():
    assert _core.CIPHERS == CIPHERS
    assert _core.preferred_cipher() in CIPHERS
    assert _core.cipher_library()


def test_the_purpose_names_the_cipher():
    for purpose, cipher in (("group 1f generation 1 collective", CIPHERS[1]), ("local", "")):
        assert split_cipher(with_cipher(purpose, cipher)) == (purpose, cipher)


class Ends:
    """The listeners of ranks 0 and 1, each with its own setting."""

    def __init__(self, monkeypatch, secret, job_id, make_member, settings: tuple[str, str]) -> None:
        self.listeners = []
        for rank, setting in enumerate(settings):
            monkeypatch.setenv("PACELINE_ENCRYPT", setting)
            self.listeners.append(LinkListener(secret, job_id, rank, want_tcp=True))
        high = self.listeners[1]
        self._member = make_member(1, unix=high.unix_name, tcp=high.tcp_address)

    def link(self, purpose: str, *, local: bool = False) -> list[Link | Exception]:
        """Return each end of a link, or its error."""
        found: list[Link | Exception] = [ConfigError("none"), ConfigError("none")]

        def note(rank: int, make) -> None:
            try:
                found[rank] = make()
            except ConfigError as error:
                found[rank] = error

        low, high = self.listeners
        calls = (
            lambda: low.connect(self._member, purpose, local),
            lambda: high.accepted(0, purpose, 10),
        )
        threads = [threading.Thread(target=note, args=one) for one in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found:
            if isinstance(one, Link):
                os.close(one.fd)
        return found

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def ends(monkeypatch, secret, job_id, make_member):
    made: list[Ends] = []

    def make(*settings: str) -> Ends:
        made.append(Ends(monkeypatch, secret, job_id, make_member, settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_both_ends_have_the_same_keys_and_no_other_connection_has_them(ends):
    both = ends("always", "always")
    seen: set[bytes] = set()
    for purpose in ("a", "a", "b"):
        low, high = both.link(purpose)
        assert low.keys.cipher == high.keys.cipher == CIPHERS[0]
        assert (low.keys.send, low.keys.receive) == (high.keys.receive, high.keys.send)
        assert {len(low.keys.send), len(low.keys.receive)} == {32}
        seen |= {low.keys.send, low.keys.receive}
        assert low.keys.send.hex() not in repr(low)
    assert len(seen) == 6


@pytest.mark.parametrize("setting", ["on", "off"])
def test_loopback_is_plain_unless_asked_for(ends, setting):
    assert [link.keys for link in ends(setting, setting).link("a")] == [None, None]


def test_unix_links_have_no_keys(ends):
    assert [link.keys for link in ends("always", "always").link("a", local=True)] == [None, None]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("always", "off"), "rank 0 sends encrypted data to rank 1, which expects plain data"),
        (("off", "always"), "rank 0 sends plain data to rank 1, which expects encrypted data"),
    ],
)
def test_ends_that_disagree_both_report_it(ends, settings, text):
    for error in ends(*settings).link("a"):
        assert isinstance(error, ConfigError), error
        assert text in str(error)
        assert f"PACELINE_ENCRYPT={settings[1]}" in str(error)
        assert "same value in every process" in str(error)
