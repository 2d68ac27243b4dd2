"""Parameter servers: tables of parameters, which workers push to and pull from.

For scripts: `Client` and what it returns. The names are looked up when they are first used; the
parts of the server import this package too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Client": "paceline.ps.client",
    "Receipt": "paceline.ps.key",
    "Subscription": "paceline.ps.subscription",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.ps' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


if TYPE_CHECKING:
    from paceline.ps.client import Client as Client
    from paceline.ps.key import Receipt as Receipt
    from paceline.ps.subscription import Subscription as Subscription
