"""Renamed methods of public base classes: the old names work until `REMOVED_IN`, with a warning.

    class Codec(RenamedMethods, renamed={"squeeze": "compress"}): ...

A subclass that still defines `squeeze` gets it as `compress`, and warns when it is defined. A call
of `squeeze` runs `compress`, and warns. CONTRIBUTING.md has the policy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

REMOVED_IN = "0.3"


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn about the use of an old name; `stacklevel` counts from the caller of this function."""
    text = f"{old} was renamed to {new}; the old name will be removed in Paceline {REMOVED_IN}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


class RenamedMethods:
    """Base of public classes whose methods got other names; knows the old ones."""

    _renamed: Mapping[str, str] = {}

    def __init_subclass__(cls, renamed: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if renamed is not None:
            cls._renamed = {**cls._renamed, **renamed}
            for old, new in renamed.items():
                setattr(cls, old, _forward(cls, old, new))
            return
        for old, new in cls._renamed.items():
            own = vars(cls).get(old)
            if own is not None and new not in vars(cls):
                warn_renamed(f"{cls.__name__}.{old}", new)
                setattr(cls, new, own)


def _forward(owner: type, old: str, new: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        warn_renamed(f"{owner.__name__}.{old}", new)
        callers = [one for one in type(self).__mro__ if old in vars(one) and one is not owner]
        base = super(callers[-1], self) if callers else self  # super().old() of a subclass
        return getattr(base, new)(*args, **kwargs)

    forward.__name__ = old
    forward.__doc__ = f"Call `{new}`, its new name."
    return forward
