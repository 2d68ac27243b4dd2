"""What an engine is: the answer to "which hosts are there" and "start an agent on this host"."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.errors import LaunchError
from paceline.launcher.hosts.host_list import HostSlots


class Engine(Protocol):
    """Starts agents on hosts; the launcher does everything else, the same for all engines."""

    name: str  # "ssh", "slurm"

    def hosts(self) -> list[HostSlots]:
        """Return the hosts with their slots, in the order of ranks."""
        ...

    async def start_agent(self, host: HostSlots, invitation: bytes) -> asyncio.subprocess.Process:
        """Start an agent on a host and send it the invitation, one line, over its stdin.

        The caller keeps the child's stdin open: its end tells the agent that the launcher is gone.
        The child's stderr has the agent's. Raises LaunchError if the child cannot be started; a
        host that cannot be reached shows as an early end of the child, see `explain`.
        """
        ...

    def explain(self, host: HostSlots, exit_code: int, errors: str) -> str:
        """Return one sentence: why a child of `start_agent` ended, and what to do."""
        ...

    async def close(self) -> None:
        """End what the engine keeps open between agents."""
        ...


async def start_child(
    command: Sequence[str],
    first_bytes: bytes,
    *,
    remedy: str,
    environ: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start a child whose stdin begins with these bytes and stays open; raises LaunchError."""
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
            # Ctrl-C in the terminal is for the launcher alone: agents still have to stop processes.
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}; {remedy}") from error
    assert child.stdin is not None
    child.stdin.write(first_bytes)
    # If it has ended already, its exit code and stderr say why.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await child.stdin.drain()
    return child
