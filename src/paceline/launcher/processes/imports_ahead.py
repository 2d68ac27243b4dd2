"""Imports ahead of time: what a script imports first, in a template that replacements are forked
from.

The launcher reads the leading imports of the script (template_imports.py); the template imports
them in the same order. It stops at the first module that only the script may import: one that is
not installed, because importing it runs code of the user, and one that cannot be imported.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Sequence

import msgspec


class FirstImport(msgspec.Struct, frozen=True):
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()


def import_ahead(first: Sequence[FirstImport]) -> None:
    """Import them until one is not installed, or fails."""
    for one in first:
        top = one.module.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in sys.modules and not _is_installed(top):
            return
        try:
            __import__(one.module, fromlist=one.names)
        except Exception:  # the script's own import reports it, with its traceback
            return


def open_files() -> set[str]:
    """Return the descriptors of this process, apart from the one that reads the list."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def _is_installed(name: str) -> bool:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return False
    places = {*site.getsitepackages(), site.getusersitepackages()}
    places |= {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    path = os.path.realpath(found.origin)
    return any(path.startswith(os.path.realpath(place) + os.sep) for place in places)
