"""Host lists: `--hosts a:4,b:4`, and the file of `--hostfile`.

A SLOT is the place of one worker. Servers and data workers need no slot.

    --hosts a:4,bob@b:4,[fe80::1]:2    the number after the colon is the number of slots

    # a host file: one host in a line    the number after the colon is the port of sshd
    a slots=4
    bob@b:2222 slots=4
    [fe80::1] slots=2

A host without a number of slots has one. A port can only be written in a host file, or in
~/.ssh/config: in --hosts it would look like a number of slots. Every error says what to type; those
of a file name the file and the line.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

# More than this on one host is a typing error.
MAX_SLOTS = 1024
_MAX_FILE_BYTES = 1 << 20
# The first character is never "-": ssh would read the name as an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+\\-]{0,252}")
_BRACKETS = re.compile(r"\[([^\[\]]*)\](.*)", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class HostSlots:
    """One host of the list; `user` and `port` are ssh's, "" and None: those of its settings."""

    name: str  # a name, an address, or a Host of ~/.ssh/config; IPv6 without brackets
    slots: int
    user: str = ""
    port: int | None = None
    server_slots: int | None = None  # places of servers; None: as many as wanted

    def __str__(self) -> str:
        """Return the host as it is written in --hosts."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{self.user}@{name}:{self.slots}" if self.user else f"{name}:{self.slots}"


class _Wrong(Exception):
    """What is wrong with one host; the caller knows where it was written."""


def parse_hosts(text: str, option: str = "--hosts") -> tuple[HostSlots, ...]:
    """Read the value of --hosts; raises ConfigError."""
    hosts: list[HostSlots] = []
    try:
        for word in text.split(","):
            _append(hosts, _from_option(word.strip()))
    except _Wrong as wrong:
        raise ConfigError(f"{option} {text[:80]}: {wrong}") from None
    return tuple(hosts)


def chosen_hosts(hosts: str | None, hostfile: Path | None) -> tuple[HostSlots, ...]:
    """Return the hosts of --hosts or --hostfile, () if neither was given."""
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile both name the hosts; give only one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    return () if hostfile is None else read_hostfile(hostfile)


def parse_host_names(text: str, option: str) -> tuple[str, ...]:
    """Read a list of host names without slots, such as that of --servers-on."""
    names = tuple(word.strip().strip("[]") for word in text.split(","))
    if not all(names):
        raise ConfigError(
            f"{option} {text[:80]!r}: expected names of hosts with commas between them, for example"
            f" {option} a,b"
        )
    return names


def read_hostfile(path: Path) -> tuple[HostSlots, ...]:
    """Read a host file; raises ConfigError with its name and the number of the line."""
    hosts: list[HostSlots] = []
    for number, line in enumerate(_lines(path), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            _append(hosts, _from_line(words))
        except _Wrong as wrong:
            raise ConfigError(f"--hostfile {path}, line {number}: {wrong}") from None
    if not hosts:
        raise ConfigError(
            f"--hostfile {path}: names no host; write one in each line, for example `a slots=4`"
        )
    return tuple(hosts)


def require_host(names: Sequence[str], hosts: Sequence[HostSlots], option: str) -> None:
    """Refuse names that are not in the list of hosts, and a name that is there twice."""
    known = [host.name for host in hosts]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{option} {','.join(names)[:80]}: {name[:40]!r} is not in the list of hosts; the"
                f" job has {', '.join(known)}"
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"{option} {','.join(names)[:80]}: {name} is there twice; name it once"
            )


def _lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"--hostfile {path}: {error.strerror}; name a readable file with one host in each line,"
            " for example `a slots=4`"
        ) from error
    if len(data) > _MAX_FILE_BYTES or b"\0" in data:
        raise ConfigError(
            f"--hostfile {path}: is no host file; expected text with one host in each line, for"
            " example `a slots=4`"
        )
    return data.decode("utf-8-sig", "replace").splitlines()


def _append(hosts: list[HostSlots], host: HostSlots) -> None:
    for other in hosts:
        if other.name.lower() == host.name.lower():
            both = HostSlots(host.name, other.slots + host.slots, host.user)
            raise _Wrong(
                f"host {host.name} is there twice; write it once with all its slots ({both}), or"
                " give two machines two names in ~/.ssh/config"
            )
    hosts.append(host)


# -- one host -----------------------------------------------------------------------------------


def _from_option(word: str) -> HostSlots:
    if not word:
        raise _Wrong("a host is missing; write hosts with commas between them, for example a:4,b:4")
    user, name, number = _split(word, "slots")
    if ":" in number:
        raise _Wrong(
            f"{word[:60]!r} has two numbers; write the port into a host file ({name}:PORT"
            " slots=N, option --hostfile) or into ~/.ssh/config"
        )
    return HostSlots(name, _slots(number, word) if number else 1, user)


def _from_line(words: Sequence[str]) -> HostSlots:
    user, name, number = _split(words[0], "port")
    slots: int | None = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key != "slots" or not equals:
            raise _Wrong(f"{word[:60]!r} is not known here; write `{words[0][:60]} slots=4`")
        if slots is not None:
            raise _Wrong("slots= is there twice; write it once")
        slots = _slots(value, word)
    if number and slots is None:
        raise _Wrong(
            f"{words[0][:60]!r}: in a host file the number after the colon is the port of sshd;"
            f" write `{name} slots={number[:9]}`, or `{words[0][:60]} slots=1` if it is the port"
        )
    return HostSlots(name, 1 if slots is None else slots, user, _port(number) if number else None)


def _split(word: str, after_colon: str) -> tuple[str, str, str]:
    """Return user, name, and what follows the colon ("" without one)."""
    user, at, rest = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise _Wrong(f"{user[:60]!r} is no name of a user; write user@host")
    brackets = _BRACKETS.fullmatch(rest)
    if brackets:
        name, after = brackets[1], brackets[2]
        if not _is_ipv6(name):
            raise _Wrong(f"{name[:60]!r} in brackets is no IPv6 address; write [fe80::1]")
        if after and (not after.startswith(":") or len(after) == 1):
            raise _Wrong(f"{rest[:60]!r}: expected the {after_colon} after it, as [{name}]:4")
        return user, name, after[1:]
    if rest.count(":") > 1 and _is_ipv6(rest):
        raise _Wrong(f"{rest[:60]!r}: write an IPv6 address in brackets: [{rest[:60]}]")
    name, colon, number = rest.partition(":")
    if not _NAME.fullmatch(name):
        raise _Wrong(
            f"{name[:60]!r} is no name of a host; expected letters, digits, '.', '-' and '_', for"
            " example node1 or 10.0.0.1"
        )
    if colon and not number:
        raise _Wrong(f"{word[:60]!r}: the {after_colon} after the colon is missing; write {name}:4")
    return user, name, number


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    zone = text.partition("%")[2]
    return not zone or bool(_NAME.fullmatch(zone))


def _slots(text: str, word: str) -> int:
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= MAX_SLOTS:
        raise _Wrong(
            f"{word[:60]!r}: expected a number of slots from 1 to {MAX_SLOTS}, for example 4"
            + ("; leave out a host that is to run nothing" if text == "0" else "")
        )
    return int(text)


def _port(text: str) -> int:
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise _Wrong(f"port {text[:40]!r}: expected a number from 1 to 65535, for example 2222")
    return int(text)
