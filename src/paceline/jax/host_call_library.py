"""Builds and loads host_call.cc, once for each version of jaxlib and Python.

The headers come with jaxlib. Without a compiler there is no library, and `host_call` uses JAX's own
callbacks, which copy every buffer.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.runtime.config import inherited_environ
from paceline.runtime.console import warn

_SOURCE = Path(__file__).with_name("host_call.cc")


def load(jax: Any, handler: Callable[[int, list[int], list[int]], None]) -> str | None:
    """Return the name of the custom call that calls `handler`; None if it cannot be built."""
    library = _build(jax)
    if library is None:
        return None
    loaded = ctypes.PyDLL(str(library))
    loaded.paceline_set_handler.argtypes = [ctypes.py_object]
    loaded.paceline_set_handler(handler)
    capsule = jax.ffi.pycapsule(loaded.paceline_host_call)
    jax.ffi.register_ffi_target("paceline_host_call", capsule, platform="cpu")
    return "paceline_host_call"


def _build(jax: Any) -> Path | None:
    import jaxlib

    changed = int(_SOURCE.stat().st_mtime)
    name = f"host_call-jaxlib{jaxlib.__version__}-{sys.implementation.cache_tag}-{changed}.so"
    library = _cache() / name
    if library.exists():
        return library
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        _warn_without("there is no C++ compiler (Debian: apt install g++)")
        return None
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, built = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    headers = [jax.ffi.include_dir(), sysconfig.get_path("include")]
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC"]
    command += [f"-I{directory}" for directory in headers]
    made = subprocess.run(
        [*command, str(_SOURCE), "-o", built], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        os.unlink(built)
        _warn_without(f"{compiler} failed: {made.stderr.strip()[:300]}")
        return None
    os.replace(built, library)  # several ranks may build it at once: the last one stays
    return library


def _cache() -> Path:
    chosen = inherited_environ().get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen).expanduser() / "paceline" / "jax"


def _warn_without(why: str) -> None:
    warn(f"paceline.jax: gradients are copied through JAX's callbacks, because {why}")
