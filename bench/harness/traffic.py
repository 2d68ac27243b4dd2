"""What a host has sent, as its network interfaces count it: headers and acknowledgements too."""

from __future__ import annotations


def sent_bytes() -> int:
    """Return what this network namespace has sent so far, except to itself."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        rows = [line.split(":") for line in file if ":" in line]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")
