"""What compression saves and what it costs: bytes, time, and how much of a gradient waits.

An `Account` is kept for every flat tensor that is compressed; the sum of a worker's is sent with
its progress, and `describe` writes it for people when the job ends: turning compression on is never
silently slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from paceline.figures import data_size


class Compression(msgspec.Struct, frozen=True):
    """What a worker has compressed so far."""

    codec: str
    steps: int
    plain_bytes: float  # what it would have sent
    sent_bytes: float
    spent_s: float  # in the codec
    trained_s: float = 0.0  # in all
    error: float | None = None  # how much of what was wanted was left out for later, 0 to 1


class Account:
    """The books of one flat tensor. Main thread only."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.plain_bytes = self.sent_bytes = 0
        self.errors = 0.0
        self.num_errors = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time inside of it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - start

    def sent(self, plain: int, really: int) -> None:
        """Count what was sent once."""
        self.plain_bytes += plain
        self.sent_bytes += really

    def missed(self, share: float) -> None:
        """Note how much was left out."""
        self.errors += share
        self.num_errors += 1


class Books:
    """All accounts of a process. Opened by the main thread, read by any."""

    def __init__(self) -> None:
        self._open: list[tuple[str, Sequence[Account]]] = []
        self._missed = (0.0, 0)  # errors and their number, as they were last told

    def open(self, codec: str, accounts: Sequence[Account]) -> None:
        """Follow these accounts, of which there may be more later."""
        self._open.append((codec, accounts))

    def lately_missed(self) -> float | None:
        """Return how much was left out since the last call; None when nobody has looked."""
        accounts = [one for _, several in self._open for one in several]
        now = sum(one.errors for one in accounts), sum(one.num_errors for one in accounts)
        before, self._missed = self._missed, now
        looks = now[1] - before[1]
        return (now[0] - before[0]) / looks if looks else None

    def read(self, steps: int, trained_s: float) -> Compression | None:
        """Return the sum behind so many steps; None where nothing is compressed."""
        if not self._open or not steps:
            return None
        accounts = [one for _, several in self._open for one in several]
        num_errors = sum(one.num_errors for one in accounts)
        return Compression(
            ", ".join(dict.fromkeys(codec for codec, _ in self._open)),
            steps,
            sum(one.plain_bytes for one in accounts),
            sum(one.sent_bytes for one in accounts),
            sum(one.spent_s for one in accounts),
            trained_s,
            sum(one.errors for one in accounts) / num_errors if num_errors else None,
        )


def describe(workers: Sequence[Compression]) -> list[str]:
    """Write for people what compression came to; nothing where nobody compressed."""
    steps = sum(worker.steps for worker in workers)
    if not steps:
        return []
    codecs = ", ".join(sorted({worker.codec for worker in workers}))
    plain = sum(worker.plain_bytes for worker in workers)
    sent = sum(worker.sent_bytes for worker in workers)
    spent_s = sum(worker.spent_s for worker in workers)
    trained_s = sum(worker.trained_s for worker in workers)
    text = f"{codecs}: {data_size(sent / steps)} per step instead of {data_size(plain / steps)}"
    text += f" (1/{plain / sent:.3g})" if sent else ""
    text += f", {1000 * spent_s / steps:.1f} ms per step to encode and decode"
    text += f" ({100 * spent_s / trained_s:.0f} % of the time)" if trained_s > 0 else ""
    errors = [worker.error for worker in workers if worker.error is not None]
    if errors:
        text += f"; {100 * sum(errors) / len(errors):.3g} % of a gradient waits for the next step"
    return [text]
