"""One line on stderr for a person who wonders why nothing happens: who waits, and for what."""

from __future__ import annotations

import sys
import time

FIRST_S = 2.0
EVERY_S = 10.0


class WaitNotice:
    """Says after 2 s, then every 10 s, that somebody still waits; `check` is called meanwhile."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._start_s = time.monotonic()
        self._due_s = self._start_s + FIRST_S

    def check(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            say(f"{self._text} ({now_s - self._start_s:.0f} s so far)")


def say(text: str) -> None:
    """Write one line to stderr in one piece, so that the lines of several ranks do not mix."""
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()
