"""Which address of a host other hosts reach: found by route lookup and tried, never guessed.

A host name says little: it may resolve to loopback, to an interface that other hosts cannot reach,
or to an address that several hosts have (a container bridge). So every host listens on each of its
addresses for a moment, and the others connect. Both sides prove that they know the job's secret and
which host they are, so an answer from a wrong machine does not count.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress

from paceline.control.transport.acceptor import Acceptor, Wire, introduce
from paceline.control.transport.auth import CallerHandshake, Hello, Session
from paceline.control.transport.sockets import connect_tcp, join_address, listen_tcp, split_address
from paceline.errors import PacelineError, SetupError
from paceline.launcher.hosts.messages import ROLE, ProbeResult, ProbeTarget

_PROBE_S = 3.0
_DISCARD_PORT = 9  # a UDP socket that is connected to it sends nothing


def local_addresses() -> list[str]:
    """Return the addresses of this host, without loopback and link-local ones."""
    found = [ipaddress.ip_address(text) for text in (*_ipv4_addresses(), *_ipv6_addresses())]
    return [str(one) for one in found if not (one.is_loopback or one.is_link_local)]


def _ipv4_addresses() -> list[str]:
    with open("/proc/net/fib_trie", encoding="ascii") as trie:
        lines = [line.strip() for line in trie]
    local = [
        before.removeprefix("|-- ")
        for before, line in zip(lines, lines[1:], strict=False)
        if line == "/32 host LOCAL"
    ]
    return list(dict.fromkeys(local))


def _ipv6_addresses() -> list[str]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            digits = [line.split()[0] for line in table]
    except OSError:  # the kernel has no IPv6
        return []
    return [str(ipaddress.IPv6Address(bytes.fromhex(one))) for one in digits]


def resolve(name: str) -> list[str]:
    """Return the addresses of a host name; none if it does not resolve here."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def is_this_host(name: str) -> bool:
    """Return whether a host name belongs to this machine: it resolves to one of its addresses."""
    own = {*local_addresses(), "127.0.0.1", "::1"}
    found = resolve(name)
    return bool(found) and all(
        address in own or ipaddress.ip_address(address.partition("%")[0]).is_loopback
        for address in found
    )


def source_address(towards: str) -> str | None:
    """Return the address from which this host sends to another one, by the kernel's routes."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock, suppress(OSError):
        sock.connect((towards, _DISCARD_PORT))
        return str(sock.getsockname()[0])
    return None


def addresses_towards(host_names: Iterable[str]) -> list[str]:
    """Return the addresses of this host by which these hosts may reach it, the likely ones first.

    A name that only ssh knows (an alias, a jump host) has no route here: then any address of this
    host may be the right one.
    """
    found: dict[str, None] = {}
    is_complete = True
    for name in host_names:
        sources = [source_address(address) for address in resolve(name)]
        known = [one for one in sources if one and not ipaddress.ip_address(one).is_loopback]
        is_complete = is_complete and bool(known)
        found.update(dict.fromkeys(known))
    if not is_complete:
        found.update(dict.fromkeys(local_addresses()))
    return list(found)


class ProbeListener:
    """Listens for the probes of other hosts while the job starts."""

    def __init__(self, secret: bytes, job_id: str, host_index: int) -> None:
        listener = _name(host_index)
        # Always plain: nothing is sent after the handshake, which reveals nothing.
        self._acceptor = Acceptor(
            secret, job_id=job_id, listener=listener, admit=self._admit, is_always_plain=True
        )
        self.addresses: list[str] = []  # host:port

    def open(self, addresses: Sequence[str]) -> None:
        """Listen on each of these addresses that this host has."""
        for address in addresses:
            with suppress(SetupError):  # an address may have gone meanwhile
                listener = listen_tcp(address)
                self._acceptor.open(listener)
                self.addresses.append(join_address(address, listener.getsockname()[1]))

    async def close(self) -> None:
        await self._acceptor.close()

    async def _admit(self, wire: Wire, session: Session, caller: Hello) -> None:
        del session, caller
        wire.close()


async def probe(
    targets: Iterable[ProbeTarget], secret: bytes, job_id: str, host_index: int
) -> list[ProbeResult]:
    """Connect to other hosts at each of their addresses, all at the same time."""
    tries = [
        _probe(target.host_index, address, secret, job_id, host_index)
        for target in targets
        for address in target.addresses
    ]
    return list(await asyncio.gather(*tries))


async def _probe(
    target: int, address: str, secret: bytes, job_id: str, host_index: int
) -> ProbeResult:
    handshake = CallerHandshake(
        secret,
        job_id=job_id,
        listener=_name(target),
        role=ROLE,
        rank=host_index,
        purpose="probe",
    )

    async def connect() -> None:
        sock = await connect_tcp(address)
        await introduce(sock, handshake, what=address)
        sock.close()

    try:
        await asyncio.wait_for(connect(), _PROBE_S)
    except asyncio.TimeoutError:
        return ProbeResult(target, address, f"no answer in {_PROBE_S:g} s")
    except PacelineError:
        return ProbeResult(target, address, "another machine answers there")
    except OSError as error:
        return ProbeResult(target, address, error.strerror or str(error))
    return ProbeResult(target, address)


def host_part(address: str) -> str:
    """Return the host of "host:port"."""
    return split_address(address)[0]


def _name(host_index: int) -> str:
    return f"host {host_index}"
