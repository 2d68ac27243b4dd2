"""What travels: the bytes that each worker hands to others, how long it waits, what codecs save.

A byte counts once for each process that it is handed to, whether that reads it in shared memory or
receives it over the network; frames and heartbeats do not count. The engine counts, a `Meter` keeps
what it said at every step, and `describe_traffic` writes it for people. What a step costs is
measured from the end of the first one on: before it, the workers hand each other the model.

An `Account` is kept for every flat tensor that is compressed; the sum of a worker's is sent with
its progress, and `describe_compression` writes it for people when the job ends: turning compression
on is never silently slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from paceline.runtime.formatting import data_size


class Traffic(msgspec.Struct, frozen=True):
    """What a worker has sent, up to its last step."""

    steps: int
    on_host: int  # bytes, as the next
    over_network: int
    per_step: float | None = None  # None: there was only one
    trained_s: float = 0.0  # from step to step
    waited_s: float = 0.0  # of it, for others

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.on_host + self.over_network


class Meter:
    """Follows the engine's counts from step to step. Not thread-safe."""

    def __init__(self, sent: Callable[[], tuple[int, int]]) -> None:
        self._sent = sent
        self._steps = 0
        self._now = (0, 0)
        self._in_first = 0
        self._trained_s = self._waited_s = 0.0

    def step_done(self, took_s: float, waited_s: float) -> None:
        """Look at the counts behind a step."""
        self._steps += 1
        self._now = self._sent()
        if self._steps == 1:
            self._in_first = sum(self._now)
        self._trained_s += took_s
        self._waited_s += min(waited_s, took_s)

    @property
    def trained_s(self) -> float:
        """In all steps."""
        return self._trained_s

    @property
    def waited_s(self) -> float:
        """For others, in all steps."""
        return self._waited_s

    def traffic(self) -> Traffic | None:
        """Return what there is to tell; None before the first step."""
        if not self._steps:
            return None
        later = self._steps - 1
        per_step = (sum(self._now) - self._in_first) / later if later else None
        return Traffic(self._steps, *self._now, per_step, self._trained_s, self._waited_s)


def describe_traffic(workers: Sequence[Traffic]) -> list[str]:
    """Write for people what the workers of a job have sent; nothing when nobody sent anything."""
    sent = [worker.num_bytes for worker in workers]
    if not sum(sent):
        return []
    who = "1 worker" if len(sent) == 1 else f"{len(sent)} workers"
    what = f"{who} sent {_span(sent, data_size)}{' each' if len(sent) > 1 else ''}"
    steps = [worker.per_step for worker in workers if worker.per_step is not None]
    if steps:
        what += f" ({_span(steps, data_size)} per step)"
    if len(sent) > 1:
        what += f", {data_size(sum(sent))} in all"
    what += _where(workers)
    shares = [w.waited_s / w.trained_s for w in workers if w.trained_s > 0]
    if shares:
        what += f"; waited {_span(shares, _percent, '')} % of the time"
    return [what]


def _where(workers: Sequence[Traffic]) -> str:
    network = sum(worker.over_network for worker in workers)
    if not network:
        return ""  # the rule
    if not sum(worker.on_host for worker in workers):
        return ", over the network"
    return f", {data_size(network)} of it over the network"


def _span(values: Sequence[float], write: Callable[[float], str], unit: str = " ") -> str:
    """Write the lowest and the highest; one of them where they read alike, a unit only once."""
    low, high = write(min(values)), write(max(values))
    if low == high:
        return high
    if unit and low.split(unit)[-1] == high.split(unit)[-1]:
        low = low.split(unit)[0]
    return f"{low} to {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


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


def describe_compression(workers: Sequence[Compression]) -> list[str]:
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
