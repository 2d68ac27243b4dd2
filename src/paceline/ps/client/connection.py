"""This process's connection to the servers of its job, where the neutral client finds it.

The job, a layer above, puts it here when it is joined and takes it away when it is left.

Threads: any; a process has one job, so this is set before anybody asks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.comm.fabric import Fabric
from paceline.errors import UsageError
from paceline.ps.client.link import ServerLink
from paceline.ps.client.remote_table import require_servers

if TYPE_CHECKING:
    from paceline.ps.client.key import Key


@dataclass
class Connection:
    """The lines to the servers, and the keys that this process has used so far."""

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
        """This worker's place: in tables it stands for the worker."""
        return self.fabric.me.number

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of those that run the script."""
        return self.fabric.membership.worker_numbers


_current: Connection | None = None


def establish(fabric: Fabric, links: Sequence[ServerLink]) -> None:
    """Let clients of this process use these lines."""
    global _current
    _current = Connection(fabric, links)


def drop() -> None:
    """Forget the lines: the job is over, or another process's."""
    global _current
    if _current is not None:
        _current.is_over = True
    _current = None


def current() -> Connection:
    """Return the connection; UsageError if there is no job, or one without servers."""
    if _current is None:
        raise UsageError("this process has not joined a job yet: call paceline.init() first")
    require_servers(_current.links, "paceline.ps.Client")
    return _current
