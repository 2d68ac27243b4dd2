"""What an engine is: the answer to "which hosts are there" and "start an agent on this host"."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from paceline.errors import LaunchError
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.preemption.notice import Notice


class LifeLine(Protocol):
    """The standard input of an agent."""

    def close(self) -> None: ...


class ErrorStream(Protocol):
    """The standard error of an agent."""

    async def readline(self) -> bytes: ...


class AgentChild(Protocol):
    """What runs an agent, as the launcher sees it: a child process, or something like one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdin(self) -> LifeLine | None: ...
    @property
    def stderr(self) -> ErrorStream | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


class Engine(Protocol):
    """Starts agents on hosts; the launcher does everything else, the same for all engines."""

    name: str  # "ssh", "slurm", "ray", "kubernetes"

    def hosts(self) -> list[HostSlots]:
        """Return the hosts with their slots, in the order of ranks."""
        ...

    async def start_agent(self, host: HostSlots, invitation: bytes) -> AgentChild:
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


@runtime_checkable
class SupplyingEngine(Engine, Protocol):
    """An engine that finds the hosts itself, when the job starts and while it runs."""

    replaces_early: bool  # it finds room for the processes of a host that is still there
    on_notice: Callable[[str, Notice], None]  # called with the name of a host that goes away

    @property
    def pid(self) -> int | None:
        """Return the pid of the engine's own child of the launcher, if there is one."""
        ...

    async def acquire(self, log: Callable[[str], None]) -> list[HostSlots]:
        """Wait for hosts with room for all processes of the start; raises LaunchError."""
        ...

    async def next_host(self) -> HostSlots:
        """Wait for a host whose room has changed, or to which the launcher may connect again."""
        ...

    def want(self, workers: int, servers: int, busy: Mapping[str, int]) -> None:
        """Ask for room for so many processes; give back room. `busy`: running workers by host."""
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
