"""Progress of one rank: collected at every step, sent a few times a second.

Two sources report about a rank. The script reports any values at any time (`pl.report`); the hooks
of the training loop count every step and measure where its time went. The newest value of each name
since the last message is sent, so neither source erases values of the other. Every step is sent
with its times (step_times.py). Between two messages a step costs one small object.

GAUGES are values that are read only when a message is sent, for example the learning rate. A value
that the script reports under the name of a gauge replaces it from then on. `LoopProgress` is a
gauge: how much of its loops the script has done.

A step has one number: the count of `step_done`, until the script reports its own numbers. From then
on those are shown, because they are the numbers in the script's logs.

Threads: any thread may report; `waiting`, `input_s` and `samples` belong to the training thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from paceline.observe.telemetry import clock
from paceline.observe.telemetry.events import (
    CODEC_ERROR,
    COMM_SHARE,
    COMPUTE_SHARE,
    DONE_SHARE,
    ProgressReport,
)
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.trace import Stopwatch
from paceline.observe.telemetry.traffic import CompressionMeter, TrafficMeter


class LoopRound:
    """The current round of one running loop."""

    __slots__ = ("count", "index")

    def __init__(self, count: int) -> None:
        self.index, self.count = 0, count


class LoopProgress:
    """How much of its loops a script has done; the display estimates the remaining time from it.

    Counted from the outermost loop inwards: the rounds of pl.epochs and pl.steps, then the batches
    of the current pass over a training loader. A script with neither reports nothing. The training
    thread counts; any thread may read.
    """

    def __init__(self) -> None:
        self._rounds: tuple[
            LoopRound, ...
        ] = ()  # the outermost loop first; replaced, never modified
        self._taken = self._length = 0  # batches of the pass; length 0: unknown

    def enter(self, count: int) -> LoopRound:
        """Enter a loop of so many rounds, inside of the running ones."""
        entered = LoopRound(count)
        self._rounds = (*self._rounds, entered)
        return entered

    def begin(self, entered: LoopRound, index: int) -> None:
        """Begin a round of a loop."""
        entered.index = index
        self._taken = self._length = 0

    def leave(self, left: LoopRound) -> None:
        """Leave a loop."""
        self._rounds = tuple(one for one in self._rounds if one is not left)

    def begin_pass(self, length: int | None) -> None:
        """Begin a pass over a training loader; None: its length is unknown."""
        self._taken, self._length = 0, length or 0

    def take_batch(self) -> None:
        """Count a batch of the pass."""
        self._taken += 1

    def percent(self) -> float | None:
        """Return how much is done; None outside of all loops."""
        rounds, taken, length = self._rounds, self._taken, self._length
        done, size = 0.0, 100.0
        for one in rounds:
            size /= max(one.count, 1)
            done += size * one.index
        if length:
            done += size * min(1.0, max(0, taken - 1) / length)  # the last batch is not done yet
        return done if rounds else None


INTERVAL_S = (
    0.2  # the table is painted twice a second: more reports would only cost the launcher time
)
MAX_STEPS = 512  # in one message; of more, the newest are sent

Gauge = Callable[[], float | None]  # None: no value now
_NOTHING: Mapping[str, float] = {}


class Reporter:
    """The progress of this process. Thread-safe; never blocks on the network."""

    def __init__(
        self,
        rank: int,
        send: Callable[[ProgressReport], None],
        sent_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        times_steps: bool = True,
    ) -> None:
        self.steps_done = 0
        self.times_steps = times_steps  # False: messages have no StepTimes
        # Totals since the start of the job. Waits for other processes outside of exchanges:
        self.waiting = Stopwatch()
        self.input_s = 0.0  # in loaders
        self.samples = 0  # of this worker's batches
        self._rank = rank
        self._send = send
        self._mu = threading.Lock()
        # Called with every value that the script reports, including those that are not sent.
        self.listener: Callable[[Mapping[str, float]], None] | None = None
        self._own_step: int | None = None  # guarded by: _mu, like everything below
        self._own_names: set[str] = set()  # of values reported by the script
        self._gauges: dict[str, Gauge] = {}
        self._ended_s = self._step_s = time.monotonic()  # end of the last step; of the shown step
        self._sent_s = float("-inf")
        self._values: dict[str, float] = {}
        self._has_news = False
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)
        self._before = (0.0, 0.0, 0)  # waited, input, samples when the last step ended
        self._waited_s = 0.0  # in exchanges of gradients
        self._reported = (0.0, 0.0, 0.0)  # totals at the last message: took, waited, input
        self._counted_input_s = 0.0
        self._meter = TrafficMeter(sent_bytes)
        self.compression = CompressionMeter()
        self._gauges[CODEC_ERROR] = self.compression.recent_error
        self.loop_progress = LoopProgress()
        self._gauges[DONE_SHARE] = self.loop_progress.percent

    def watch(self, name: str, gauge: Gauge) -> None:
        """Read a value for each message; a new gauge replaces the one of the same name. Any thread
        may call it: it must be quick and must not report."""
        with self._mu:
            self._gauges[name] = gauge

    def begin(self) -> None:
        """Begin the next step now, without the time before it (setting up a model)."""
        with self._mu:
            self._ended_s = time.monotonic()
            self._before = (self.waiting.seconds, self.input_s, self.samples)

    def step_done(
        self,
        values: Mapping[str, float] = _NOTHING,
        took_s: float | None = None,
        waited_s: float = 0.0,
    ) -> None:
        """Count one step. `took_s`: by default since the end of the last step. `waited_s`: time
        spent waiting in exchanges of gradients and parameters; `waiting` has all other waits."""
        now_s = time.monotonic()
        with self._mu:
            self.steps_done += 1
            if took_s is None:
                took_s = now_s - self._ended_s
            self._ended_s = now_s
            self._waited_s += min(waited_s, took_s)
            self._time_step(took_s, waited_s)
            if self._own_step is None:
                self._step_s = now_s
            self._take(values, now_s)

    def _time_step(self, took_s: float, waited_s: float) -> None:
        waiting_s, input_s, samples = self.waiting.seconds, self.input_s, self.samples
        waiting_before_s, input_before_s, samples_before = self._before
        self._before = (waiting_s, input_s, samples)
        waited_s = min(took_s, waited_s + waiting_s - waiting_before_s)
        self._meter.step_done(took_s, waited_s)
        if not self.times_steps:
            return
        # A loader that another thread reads may wait while this thread computes.
        input_s = min(input_s - input_before_s, took_s - waited_s)
        self._counted_input_s += input_s
        self._steps.append(
            StepTimes(
                self.steps_done,
                clock.now_s(),
                took_s,
                input_s,
                waited_s,
                samples - samples_before,
            )
        )

    @property
    def waited_s(self) -> float:
        """Time that this rank has waited for other processes so far."""
        with self._mu:
            return self._waited_s + self.waiting.seconds

    def report(self, step: int | None, values: Mapping[str, float]) -> None:
        """Report values of the script; `step` None keeps the current step number."""
        now_s = time.monotonic()
        with self._mu:
            if step is not None:
                self._own_step, self._step_s = step, now_s
            self._own_names.update(values)
            self._take(values, now_s)
        if self.listener is not None:
            self.listener(values)

    def flush(self) -> None:
        """Send what has not been sent yet."""
        with self._mu:
            if self._has_news:
                self._send_all(time.monotonic())

    def _take(self, values: Mapping[str, float], now_s: float) -> None:
        self._values.update(values)
        self._has_news = True
        if now_s - self._sent_s >= INTERVAL_S:
            self._send_all(now_s)

    def _send_all(self, now_s: float) -> None:
        values, self._values = {**self._shares(), **self._read_gauges(), **self._values}, {}
        self._has_news, self._sent_s = False, now_s
        step = self.steps_done if self._own_step is None else self._own_step
        age_s, traffic = now_s - self._step_s, self._meter.traffic()
        read = (
            self.compression.read(traffic.steps, traffic.trained_s) if traffic is not None else None
        )
        steps = tuple(self._steps)
        self._steps.clear()
        self._send(ProgressReport(self._rank, step, values, age_s, traffic, read, steps))

    def _shares(self) -> dict[str, float]:
        """Return the shares of time of the steps since the last message, in percent."""
        totals = (self._meter.trained_s, self._meter.waited_s, self._counted_input_s)
        took_s, waited_s, input_s = (
            now - before for now, before in zip(totals, self._reported, strict=True)
        )
        self._reported = totals
        if took_s <= 0:
            return {}
        computed = max(0.0, took_s - waited_s - input_s)
        return {COMPUTE_SHARE: 100 * computed / took_s, COMM_SHARE: 100 * waited_s / took_s}

    def _read_gauges(self) -> dict[str, float]:
        if not self.times_steps:
            return {}
        read = {n: gauge() for n, gauge in self._gauges.items() if n not in self._own_names}
        return {name: value for name, value in read.items() if value is not None}
