"""Bytes that workers send, time that they wait, and what codecs save.

A byte counts once for each process that it is sent to, whether that process reads it in shared
memory or receives it over the network. Frame headers and heartbeats do not count. The engine
counts, a `TrafficMeter` reads its counters at every step, and `describe_traffic` returns text.
Per-step figures begin after the first step, in which workers exchange the initial model.

A `CodecStats` belongs to each flat tensor that is compressed. Their sum is sent with each progress
report, and `describe_compression` returns text for the closing summary: if compression makes a job
slower, the summary shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from paceline.runtime.formatting import data_size


class Traffic(msgspec.Struct, frozen=True):
    """Bytes that a worker has sent, up to its last step."""

    steps: int
    on_host: int  # bytes, like over_network
    over_network: int
    per_step: float | None = None  # None: after only one step
    trained_s: float = 0.0  # in all steps
    waited_s: float = 0.0  # of it: waiting for other processes

    @property
    def num_bytes(self) -> int:
        return self.on_host + self.over_network


class TrafficMeter:
    """Reads the engine's counters at each step. Not thread-safe."""

    def __init__(self, sent: Callable[[], tuple[int, int]]) -> None:
        self._sent = sent
        self._steps = 0
        self._now = (0, 0)
        self._in_first = 0
        self._trained_s = self._waited_s = 0.0

    def step_done(self, took_s: float, waited_s: float) -> None:
        """Read the counters after a step."""
        self._steps += 1
        self._now = self._sent()
        if self._steps == 1:
            self._in_first = sum(self._now)
        self._trained_s += took_s
        self._waited_s += min(waited_s, took_s)

    @property
    def trained_s(self) -> float:
        return self._trained_s

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def traffic(self) -> Traffic | None:
        """Return the totals; None before the first step."""
        if not self._steps:
            return None
        later = self._steps - 1
        per_step = (sum(self._now) - self._in_first) / later if later else None
        return Traffic(self._steps, *self._now, per_step, self._trained_s, self._waited_s)


def describe_traffic(workers: Sequence[Traffic]) -> list[str]:
    """Return a sentence about the bytes that workers sent; nothing if they sent none."""
    sent = [worker.num_bytes for worker in workers]
    if not sum(sent):
        return []
    workers_text = "1 worker" if len(sent) == 1 else f"{len(sent)} workers"
    text = f"{workers_text} sent {_span(sent, data_size)}{' each' if len(sent) > 1 else ''}"
    steps = [worker.per_step for worker in workers if worker.per_step is not None]
    if steps:
        text += f" ({_span(steps, data_size)} per step)"
    if len(sent) > 1:
        text += f", {data_size(sum(sent))} in all"
    text += _where(workers)
    shares = [w.waited_s / w.trained_s for w in workers if w.trained_s > 0]
    if shares:
        text += f"; waited {_span(shares, _percent, '')} % of the time"
    return [text]


def _where(workers: Sequence[Traffic]) -> str:
    network = sum(worker.over_network for worker in workers)
    if not network:
        return ""  # the usual case: one host
    if not sum(worker.on_host for worker in workers):
        return ", over the network"
    return f", {data_size(network)} of it over the network"


def _span(values: Sequence[float], write: Callable[[float], str], unit: str = " ") -> str:
    """Return "low to high"; one of them if they read alike, with the unit only once."""
    low, high = write(min(values)), write(max(values))
    if low == high:
        return high
    if unit and low.split(unit)[-1] == high.split(unit)[-1]:
        low = low.split(unit)[0]
    return f"{low} to {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


class Compression(msgspec.Struct, frozen=True):
    """Totals of a worker's compression so far."""

    codec: str
    steps: int
    plain_bytes: float  # without compression
    sent_bytes: float
    spent_s: float  # encoding and decoding
    trained_s: float = 0.0  # in all steps
    error: float | None = None  # share of a gradient that is left for later steps, 0 to 1


class CodecStats:
    """Counters of one compressed flat tensor. Main thread only."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.plain_bytes = self.sent_bytes = 0
        self.errors = 0.0
        self.num_errors = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time spent inside of it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - start

    def add_sent(self, plain: int, sent: int) -> None:
        """Add the bytes of one message."""
        self.plain_bytes += plain
        self.sent_bytes += sent

    def add_error(self, share: float) -> None:
        """Add the share of a gradient that one message left out."""
        self.errors += share
        self.num_errors += 1


class CompressionMeter:
    """The counters of all compressed tensors of a process. Any thread may read."""

    def __init__(self) -> None:
        self._stats: list[tuple[str, Sequence[CodecStats]]] = []
        self._errors = (0.0, 0)  # their sum and number at the last call of recent_error

    def open(self, codec: str, stats: Sequence[CodecStats]) -> None:
        """Include these counters; the sequence may grow later."""
        self._stats.append((codec, stats))

    def recent_error(self) -> float | None:
        """Return the mean error since the last call; None if none was measured."""
        every = [one for _, several in self._stats for one in several]
        now = sum(one.errors for one in every), sum(one.num_errors for one in every)
        before, self._errors = self._errors, now
        count = now[1] - before[1]
        return (now[0] - before[0]) / count if count else None

    def read(self, steps: int, trained_s: float) -> Compression | None:
        """Return the totals after so many steps; None if nothing is compressed."""
        if not self._stats or not steps:
            return None
        every = [one for _, several in self._stats for one in several]
        num_errors = sum(one.num_errors for one in every)
        return Compression(
            ", ".join(dict.fromkeys(codec for codec, _ in self._stats)),
            steps,
            sum(one.plain_bytes for one in every),
            sum(one.sent_bytes for one in every),
            sum(one.spent_s for one in every),
            trained_s,
            sum(one.errors for one in every) / num_errors if num_errors else None,
        )


def describe_compression(workers: Sequence[Compression]) -> list[str]:
    """Return a sentence about savings and costs of compression; nothing if none was used."""
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
