"""Ends a forked process without taking down what it shares with the others.

When an interpreter ends, it takes every module apart, and the libraries run their destructors. That
writes to nearly all memory that a fork shares with its template: 120 MB with torch, copied page by
page, and 0.2 s. If hundreds of processes end together, the host has no memory for that. On a host
with many processes of a job, a process therefore ends as follows. All that a script can observe
happens as in any interpreter, and in the same order: threads are joined, exit handlers run, the
modules that the script has made or imported are cleared, so that their objects are finalized and
their files are written, streams are flushed. The modules of the template stay as they are. Exit
handlers of C libraries (`atexit(3)`, destructors of static objects) do not run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Collection

from paceline.runtime.console import warn

_UNFLUSHED = 120  # the exit code of an interpreter that cannot write its last output


def end_after(run: Callable[[], None], shared: Collection[str]) -> None:
    """Run a script, then end the process. The modules named `shared` are the template's."""
    status = 0
    try:
        run()
    except SystemExit as end:
        status = _exit_code(end)
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does
    atexit._run_exitfuncs()
    own = [name for name in sys.modules if name not in shared or name == "__main__"]
    for name in sorted(own, key=lambda name: name != "__main__"):  # the script's first
        module = sys.modules.get(name)
        with contextlib.suppress(TypeError):  # a script may put anything there
            vars(module).clear()
        del module
    gc.collect()
    os._exit(_UNFLUSHED if not _flush() and status == 0 else status)


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of the process as the interpreter finds it; print what is no number."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    if sys.stderr is not None:
        sys.stderr.write(f"{end.code}\n")  # as the interpreter does
    return 1


def _flush() -> bool:
    """Write the last output; return whether that was possible."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError) as error:  # noqa: PERF203
            is_written = False
            if stream is sys.stdout:
                warn(f"the last output cannot be written: {error}")
    ctypes.CDLL(None).fflush(None)
    return is_written
