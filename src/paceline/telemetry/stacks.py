"""Where a process is: it prints the stacks of its threads when the launcher sends it a signal.

Python's own fault handler does that, inside of the signal: also when the process holds the GIL in a
loop of C, which is when nobody else could say where it is. The signal is one of those that mean
nothing to anybody else, so a script may use SIGUSR1 and SIGUSR2 as it likes.
"""

from __future__ import annotations

import faulthandler
import signal

STACKS_SIGNAL = signal.SIGRTMIN + 10


def show_on_request() -> None:
    """Print stacks to stderr on that signal, unless the script has a handler of its own."""
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
