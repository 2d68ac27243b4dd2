"""What ssh's last words mean, and what the user can do.

ssh ends with 255 for each of its own failures; only its text tells them apart. The texts are those
of OpenSSH and of the system's C library, which do not follow the user's language.
"""

from __future__ import annotations

import re

from paceline.launcher.hosts.host_list import HostSlots

SSH_FAILED = 255

_BROKEN = (
    "the connection to host {host} broke; the host has lost power or network, or its sshd was"
    " stopped"
)
# In order: the first that is found. {ssh} is the command to try by hand.
_MEANINGS: tuple[tuple[str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key for \S+ has changed",
        "the key of host {host} is not the one in known_hosts: the host was installed again, or"
        " another one answers in its place; if you expect that, run `ssh-keygen -R {known}` and"
        " then `{ssh}` once",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "the key of host {host} is not known here; run `{ssh}` once in a terminal and compare it",
    ),
    (
        r"Could not resolve hostname",
        "host {host} is unknown: its name has no address; check the spelling, or add it to"
        " ~/.ssh/config or /etc/hosts",
    ),
    (
        r"Permission denied|Too many authentication failures|No more authentication methods",
        "host {host} refuses your key, or asks for a password, which Paceline never types; make"
        " `{ssh}` work without a password: `ssh-copy-id` or ssh-agent",
    ),
    (
        r"Connection refused",
        "nothing accepts ssh connections at host {host}, port {port}; start sshd there, or name its"
        " port in ~/.ssh/config or in a host file (`{name}:PORT slots={slots}`)",
    ),
    (
        r"Timeout, server \S+ not responding",
        "host {host} does not answer any more; it has lost power or network",
    ),
    (
        r"timed out|No route to host|Network is unreachable",
        "host {host} does not answer at port {port}; check that it is switched on, and the network"
        " and firewalls between",
    ),
    (
        r"Bad owner or permissions on|Bad configuration option|terminating, \d+ bad config",
        "ssh refuses its own settings; correct the file that it names",
    ),
    (
        r"(kex_exchange_identification|banner exchange).*(closed|reset)",
        "host {host} closes ssh connections before the log-in; its sshd has too many (MaxStartups)"
        " or does not allow this address",
    ),
    (
        r"Broken pipe|Connection reset|[Cc]onnection (to \S+ )?closed|closed by remote host",
        _BROKEN,
    ),
)


def explain_ssh(host: HostSlots, errors: str) -> str:
    """Return one sentence for an ssh that ended with 255."""
    at = f"{host.user}@{host.name}" if host.user else host.name
    port = [] if host.port is None else ["-p", str(host.port)]
    bracketed = f"'[{host.name}]:{host.port}'" if host.port not in (None, 22) else host.name
    names = {
        "host": host.name,
        "name": host.name,
        "slots": host.slots,
        "port": _port(errors) or host.port or 22,
        "ssh": " ".join(["ssh", *port, at]),
        "known": bracketed,
    }
    if not errors.strip():  # of a shared connection, whose own words go nowhere
        return _BROKEN.format(**names)
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, errors):
            return meaning.format(**names) + _quoted(errors, pattern)
    last = errors.strip().splitlines()[-1].strip()
    return f"ssh to host {host.name} failed: {last}; try `{names['ssh']}` by hand"


def _port(errors: str) -> int | None:
    """Return the port that ssh tried, which its settings may have changed."""
    found = re.search(r"\bport (\d+)", errors)
    return int(found[1]) if found else None


def _quoted(errors: str, pattern: str) -> str:
    """Return the line that decided, for a search; not those that are a picture."""
    for line in errors.splitlines():
        if re.search(pattern, line) and "@@" not in line and not line.startswith("@"):
            return f" (ssh: {line.strip().removeprefix('ssh: ')})"
    return ""
