"""Links that are emulated between the processes of one machine, by pacing in the engine.

PACELINE_EMULATE_LINKS names a file that `paceline compare` makes for its jobs and removes
afterwards: a variable that was left behind is an error, never a slow job. In such a job each worker
counts as a host of its own, with the server beside it: their ranks are equal modulo the number of
hosts. Between these hosts the engine uses TCP, and delays what it sends (emulation/ in the core).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.runtime.formatting import short_duration

VARIABLE = "PACELINE_EMULATE_LINKS"
_MARK = "-emulated"


class EmulatedLinks(msgspec.Struct, frozen=True):
    """What the file says."""

    path: str
    num_hosts: int
    bytes_per_s: float
    latency_s: float

    @classmethod
    def create(
        cls, path: Path, num_hosts: int, bytes_per_s: float, latency_s: float
    ) -> EmulatedLinks:
        """Write a new file."""
        from paceline import _core  # only such jobs need it in the launcher

        _core.create_emulated_links(str(path), num_hosts, bytes_per_s, latency_s)
        return cls(str(path), num_hosts, bytes_per_s, latency_s)

    @classmethod
    def read(cls, path: str) -> EmulatedLinks:
        """Read the file; UsageError if there is none."""
        from paceline import _core

        return cls(path, *_core.read_emulated_links(path))

    @classmethod
    def of_job(cls, environ: Mapping[str, str], *, has_hosts: bool) -> EmulatedLinks | None:
        """Return the links that the environment of a launcher asks for, or None."""
        path = environ.get(VARIABLE, "").strip()
        if path and has_hosts:
            raise ConfigError(f"{VARIABLE} with hosts: their links are real; unset it")
        return cls.read(path) if path else None

    @property
    def text(self) -> str:
        """One line for the user."""
        return (
            f"links are emulated by pacing in the engine: {self.num_hosts} hosts of one worker"
            f" each, {self.bytes_per_s * 8e-6:g} Mbit/s, {short_duration(self.latency_s)} one way"
        )

    def host_id(self, machine: str, rank: int) -> str:
        """Return the id of the emulated host of a process."""
        return f"{machine}{_MARK}{rank % self.num_hosts}"


def require_emulated_host(path: str, host_id: str) -> None:
    """Raise ConfigError if a process has emulated links, but is on no emulated host."""
    if path and _MARK not in host_id:
        raise ConfigError(f"{VARIABLE} is for jobs that `paceline run` starts; unset it")
