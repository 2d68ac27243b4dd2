"""Parameter servers: tables of parameters that workers push to and pull from.

    client/        a worker's or a script's side: Client, RemoteTable, links with failover
    server/        the server process: tables, shards, clocks, update rules
    replication/   copies of a partition and how they stay equal
    messages.py, connection.py   what both sides send, and the connection between them
    placement.py, spec.py, packing.py, state_wire.py   shared by both sides

Start with server/table.py and client/remote_table.py. server/staleness_bound.py decides the
staleness bound. For scripts: `Client` and what it returns; the names are looked up when they are
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Client": "paceline.ps.client.client",
    "Receipt": "paceline.ps.client.key",
    "Subscription": "paceline.ps.client.subscription",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.ps' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


if TYPE_CHECKING:
    from paceline.ps.client.client import Client as Client
    from paceline.ps.client.key import Receipt as Receipt
    from paceline.ps.client.subscription import Subscription as Subscription
