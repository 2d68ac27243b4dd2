"""Who waits for whom at this moment, and where a process is that others wait for.

A process that waits for others longer than a limit tells the launcher: what it waits in, and
without whom it cannot go on. It tells so again when others are missing than before, every few
seconds (who has fallen silent may be out of its wait by now, and stuck elsewhere), and when it is
over: then it waits for no ranks. Servers speak for workers: only they know whose part an answer is
still short of.

The one that is missing prints the stacks of its threads when the launcher sends it a signal.
Python's own fault handler does that, inside of the signal: also when the process holds the GIL in a
loop of C, which is when nobody else could say where it is. The signal is one of those that mean
nothing to anybody else, so a script may use SIGUSR1 and SIGUSR2 as it likes.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Iterable

import msgspec

AGAIN_S = 5.0
_MOST = 8  # waits of one rank that are told at a time


class Waiting(msgspec.Struct, frozen=True, tag_field="type", tag="waiting"):
    """`rank` has waited `waited_s` in `operation` for others; for none: that wait is over."""

    rank: int
    operation: str
    for_ranks: tuple[int, ...] = ()
    waited_s: float = 0.0
    told_by: int | None = None  # a server that knows for whom its answer waits; None: by itself


class WaitTeller:
    """Turns "these are the long waits now" into events about what has changed. Not thread-safe."""

    def __init__(self, report: Callable[[Waiting], None]) -> None:
        self._report = report
        self._told: dict[tuple[int, str], Waiting] = {}

    def tell(self, waits: Iterable[Waiting]) -> None:
        """Take in all long waits of this moment; report those that began, changed or ended."""
        longest = sorted(waits, key=lambda wait: -wait.waited_s)[:_MOST]
        now = {(wait.rank, wait.operation): wait for wait in reversed(longest)}
        for key, wait in now.items():
            told = self._told.get(key)
            is_known = told is not None and told.for_ranks == wait.for_ranks
            if told is not None and is_known and wait.waited_s < told.waited_s + AGAIN_S:
                now[key] = told
            else:
                self._report(wait)
        for key in self._told.keys() - now.keys():
            rank, operation = key
            self._report(Waiting(rank, operation, told_by=self._told[key].told_by))
        self._told = now


STACKS_SIGNAL = signal.SIGRTMIN + 10


def show_on_request() -> None:
    """Print stacks to stderr on that signal, unless the script has a handler of its own."""
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
