"""Horovod's timeline: a file of this process's operations for chrome://tracing or Perfetto.

`paceline run --trace` shows the steps of all processes and where they waited; see the guide
"Monitoring".
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import IO, Any

from paceline.horovod import session
from paceline.runtime.config import inherited_environ

_mu = threading.Lock()
_file: IO[str] | None = None  # guarded by _mu
_marks_cycles = False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write the operations of this rank from now on; ranks above 0 add `.rank1` to the name."""
    global _file, _marks_cycles
    me = session.rank()
    path = Path(file_path if me == 0 else f"{file_path}.rank{me}")
    stop_timeline()  # another one, perhaps of the launcher
    with _mu:
        _file, _marks_cycles = path.open("w"), mark_cycles
        _file.write("[\n")
        _write({"name": "process_name", "ph": "M", "pid": me, "args": {"name": f"rank {me}"}})


def stop_timeline() -> None:
    """End the file; without effect if there is none."""
    global _file
    with _mu:
        if _file is None:
            return
        _file.write(json.dumps({"name": "end", "ph": "i", "ts": now_s() * 1e6, "pid": 0}) + "\n]\n")
        _file.close()
        _file = None


def start_from_environment() -> None:
    """Start a timeline if the launcher asks for it (HOROVOD_TIMELINE)."""
    path = inherited_environ().get("HOROVOD_TIMELINE")
    if path and _file is None:
        start_timeline(path)


def now_s() -> float:
    """Return the time for `add`; 0 while no timeline is written."""
    return time.monotonic() if _file is not None else 0.0


def add(name: str, started_s: float) -> None:
    """Write an operation that has ended."""
    if _file is None or not started_s:
        return
    kind, _, rest = name.partition(".")
    span = {"ph": "X", "ts": started_s * 1e6, "dur": (now_s() - started_s) * 1e6}
    with _mu:
        if _file is not None:
            _write({"name": kind.upper(), "pid": session.rank(), "tid": rest or kind, **span})


def _write(event: dict[str, Any]) -> None:
    assert _file is not None
    _file.write(json.dumps(event) + ",\n")
    _file.flush()


session.at_shutdown(stop_timeline)
