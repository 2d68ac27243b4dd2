"""Which backends a call to torch.distributed asks for.

A creator of backends is not told whether its group has others, too (`cpu:paceline,cuda:nccl`), so
the functions that create groups are wrapped. Imported during `import torch`: imports nothing more.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any


def can_be_a_part() -> bool:
    """Return whether this torch lets Python create one of several backends (2.14 and newer)."""
    from torch._C._distributed_c10d import Backend

    create: Any = Backend
    try:
        create(0, 1)
    except TypeError:  # 2.13: no constructor
        return False
    return True


class _Requests(threading.local):
    """The backends that this thread's call to torch asks for."""

    backend: Any = None
    is_open = False


_requests = _Requests()


def has_several() -> bool:
    """Return whether the group that this thread is creating has several backends."""
    backend = _requests.backend
    if not _requests.is_open:
        return False
    c10d: Any = _module()
    if backend is None:  # new_group: as the default group
        if not c10d.is_initialized():
            return False
        backend = c10d._world.pg_backend_config[c10d._get_default_group()]
    config = c10d.BackendConfig(backend)
    return len(set(config.get_device_backend_map().values())) > 1


def note_requests(dist: Any) -> None:
    """Wrap the functions of torch.distributed that create groups."""
    c10d: Any = _module()
    # torch 2.15 attaches a flight recorder to all groups but these, and fails with groups that are
    # written in Python.
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add("paceline")
    for name, place in (("init_process_group", 0), ("new_group", 2)):
        wrapped = _noting(getattr(c10d, name), place)
        setattr(c10d, name, wrapped)
        setattr(dist, name, wrapped)


def _noting(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def create(*arguments: Any, **named: Any) -> Any:
        asked = arguments[place] if len(arguments) > place else named.get("backend")
        before = _requests.backend, _requests.is_open
        _requests.backend, _requests.is_open = asked, True
        try:
            return function(*arguments, **named)
        finally:
            _requests.backend, _requests.is_open = before

    return create


def _module() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")
