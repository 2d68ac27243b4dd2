"""Reports of long waits, and stacks of the process that the others wait for.

A process that has waited longer than a limit reports to the launcher in which operation it waits,
and for which ranks. It reports again every few seconds, when the ranks change (a rank that was
silent may have left its wait and be stuck elsewhere), and when the wait is over: then with no
ranks. Servers report for workers, because only a server knows whose contribution an answer lacks.

The missing process prints the stacks of its threads when the launcher sends it a signal. Python's
fault handler does that inside the signal handler, so it also works while the process holds the GIL
in a loop of C code. The signal is a real-time signal without another meaning, so a script may use
SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Iterable

import msgspec

AGAIN_S = 5.0
_MAX_WAITS = 8  # of one process that are reported at a time


class WaitReport(msgspec.Struct, frozen=True, tag_field="type", tag="waiting"):
    """`rank` has waited `waited_s` in `operation` for ranks; without ranks: that wait is over."""

    rank: int
    operation: str
    for_ranks: tuple[int, ...] = ()
    waited_s: float = 0.0
    told_by: int | None = None  # the server that reports for `rank`; None: `rank` itself


class WaitReporter:
    """Compares the current long waits with the last ones and reports changes. Not thread-safe."""

    def __init__(self, report: Callable[[WaitReport], None]) -> None:
        self._report = report
        self._reported: dict[tuple[int, str], WaitReport] = {}

    def update(self, waits: Iterable[WaitReport]) -> None:
        """Report which of the current long waits began or changed, and which earlier ones ended."""
        longest = sorted(waits, key=lambda wait: -wait.waited_s)[:_MAX_WAITS]
        now = {(wait.rank, wait.operation): wait for wait in reversed(longest)}
        for key, wait in now.items():
            last = self._reported.get(key)
            is_known = last is not None and last.for_ranks == wait.for_ranks
            if last is not None and is_known and wait.waited_s < last.waited_s + AGAIN_S:
                now[key] = last
            else:
                self._report(wait)
        for key in self._reported.keys() - now.keys():
            rank, operation = key
            self._report(WaitReport(rank, operation, told_by=self._reported[key].told_by))
        self._reported = now


STACKS_SIGNAL = signal.SIGRTMIN + 10


def print_stacks_on_signal() -> None:
    """Print stacks to stderr on STACKS_SIGNAL, unless the script has its own handler."""
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
