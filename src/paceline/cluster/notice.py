"""One line on stderr for a person who wonders why nothing happens: who waits, and for what.

Notices that name an operation and ranks are also there for `wait_watch.py`, as long as somebody
holds them: a function that waits has its notice in a variable, and lets go of it when it returns.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

from paceline.console import warn

FIRST_S = 2.0
EVERY_S = 10.0

_mu = threading.Lock()
_held: weakref.WeakSet[WaitNotice] = weakref.WeakSet()  # guarded by: _mu


class WaitNotice:
    """Says after 2 s, then every 10 s, that somebody still waits; `check` is called meanwhile.

    Without text it only is there. `operation`: what it waits in, in few words. `ranks`: for whom,
    and may be set anew. `waited_s`: for so long it has waited already.
    """

    def __init__(
        self, text: str, operation: str = "", ranks: Sequence[int] = (), waited_s: float = 0.0
    ) -> None:
        self.operation, self.ranks = operation, tuple(ranks)
        self._text = text
        self._start_s = time.monotonic() - waited_s
        self._due_s = self._start_s + FIRST_S
        self._is_known = not operation

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._start_s

    def check(self) -> bool:
        """Speak if it is time to; true: it was."""
        if not self._is_known:  # not before: most waits are over before anybody would ask
            self._is_known = True
            with _mu:
                _held.add(self)
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + EVERY_S
        if self._text:
            warn(f"{self._text} ({now_s - self._start_s:.0f} s so far)")
        return True


def present_waits() -> list[tuple[str, float, Sequence[int]]]:
    """Return what this process waits in, for how long so far, and for which ranks. Any thread."""
    with _mu:
        held = list(_held)
    return [(notice.operation, notice.waited_s, notice.ranks) for notice in held if notice.ranks]
