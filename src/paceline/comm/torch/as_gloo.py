"""PACELINE_AS_GLOO=1: scripts and libraries that ask torch.distributed for gloo get our backend.

Accelerate and Transformers choose gloo on a CPU by themselves, and refuse other names. The
functions that create groups are wrapped; everything else in torch stays as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

_OURS = "paceline"


def stand_in_for_gloo(c10d: Any, dist: Any) -> None:
    """Wrap the functions of torch.distributed that take the name of a backend."""
    for name, place in (("init_process_group", 0), ("new_group", 2)):
        wrapped = _renaming(getattr(c10d, name), place)
        setattr(c10d, name, wrapped)
        setattr(dist, name, wrapped)


def _renaming(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def create(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > place:
            changed = [*arguments]
            changed[place] = rename(changed[place])
            return function(*changed, **named)
        if "backend" in named:
            named["backend"] = rename(named["backend"])
        return function(*arguments, **named)

    return create


def rename(backend: Any) -> Any:
    """Return a backend's name, "cpu:gloo,cuda:nccl" too, with ours in the place of gloo."""
    return re.sub(r"\bgloo\b", _OURS, backend.lower()) if isinstance(backend, str) else backend
