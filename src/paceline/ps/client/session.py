"""This process's links to the servers of its job, where `ps.Client` finds them.

The job, a layer above, opens the session when it is joined and closes it when it is left.

Threads: any; a process has one job, so the session is set before any thread asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.comm.fabric import Fabric
from paceline.errors import UsageError
from paceline.ps.client.failover import ControlAgent
from paceline.ps.client.link import ServerLink

if TYPE_CHECKING:
    from paceline.ps.client.key import Key


@dataclass
class ClientSession:
    """The links to the servers, and the keys that this process has used so far."""

    fabric: Fabric
    links: Sequence[ServerLink]
    keys: dict[str, Key] = field(default_factory=dict)  # of all clients: a rank has one clock
    init_mu: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    @property
    def rank(self) -> int:
        return self.fabric.rank

    @property
    def number(self) -> int:
        """This worker's number, by which tables know it."""
        return self.fabric.me.number

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of the job's workers."""
        return self.fabric.membership.worker_numbers


_current: ClientSession | None = None


def establish(
    fabric: Fabric, agent: ControlAgent | None = None, on_wait: Callable[[], None] | None = None
) -> tuple[ServerLink, ...]:
    """Create this worker's links, one for each partition, and let clients of this process use them.

    `agent`: the job is elastic, and the links fail over; connections are formed when they are first
    needed. `on_wait` is then called in long waits on the main thread.
    """
    global _current
    on_wait = on_wait if agent is not None else None
    partitions = range(len(fabric.membership.holders))
    links = tuple(ServerLink(fabric, index, agent, on_wait) for index in partitions)
    _current = ClientSession(fabric, links)
    return links


def drop() -> None:
    """Forget the links: the job is over, or belongs to the parent of this process."""
    global _current
    if _current is not None:
        _current.is_over = True
    _current = None


def current() -> ClientSession:
    """Return the session; UsageError if there is no job, or one without servers."""
    if _current is None:
        raise UsageError("this process has not joined a job yet: call paceline.init() first")
    if not _current.links:
        raise UsageError(
            "paceline.ps.Client needs parameter servers, and this job has none: start it with"
            " `paceline run -n 2 -s 1 ...` (or -s colocated)"
        )
    return _current
