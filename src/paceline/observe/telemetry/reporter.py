"""What one rank tells about its progress: collected at every step, sent a few times a second.

Two speak about the same rank. The script reports what it likes (`pl.report`), when it likes; the
training loop's hooks count every step and measure where its time went. Both land here. What has
been said since the last message is merged by name, the newest value of each, so neither erases the
other's; the display keeps the last value of every name anyway. Of the steps all are told, each with
its times (step_times.py). Between two messages a step costs one small object.

GAUGES are values that are read only when a message leaves: the learning rate, for example. What the
script reports under the name of a gauge wins, from then on. `Headway` is one: how much of its loops
the script has done.

Steps have one number: the count of `step_done`, until the script gives numbers of its own. From
then on the script's are shown, because those are the ones in its logs.

Threads: any may report; `waiting`, `input_s` and `samples` belong to the one that trains.
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
    Progress,
)
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.trace import Stopwatch
from paceline.observe.telemetry.traffic import Books, Meter


class Round:
    """One loop that is under way."""

    __slots__ = ("count", "index")

    def __init__(self, count: int) -> None:
        self.index, self.count = 0, count


class Headway:
    """How much of its loops a script has done, so that others can say how long the rest will take.

    Counted from outside to inside: the rounds of pl.epochs and pl.steps, then the batches of the
    pass over a loader for training that is under way. A script with neither says nothing. One
    thread, which trains, counts; any may read.
    """

    def __init__(self) -> None:
        self._rounds: tuple[Round, ...] = ()  # the outermost loop first; replaced whole
        self._taken = self._length = 0  # batches of the pass; a length of 0 is not known

    def enter(self, count: int) -> Round:
        """A loop of so many rounds begins, in those that are under way."""
        entered = Round(count)
        self._rounds = (*self._rounds, entered)
        return entered

    def begin(self, entered: Round, index: int) -> None:
        """A round of a loop begins."""
        entered.index = index
        self._taken = self._length = 0

    def leave(self, left: Round) -> None:
        """A loop has ended."""
        self._rounds = tuple(one for one in self._rounds if one is not left)

    def begin_pass(self, length: int | None) -> None:
        """A pass over a loader for training begins; None: nobody knows how long it is."""
        self._taken, self._length = 0, length or 0

    def take_batch(self) -> None:
        """A batch of the pass is used."""
        self._taken += 1

    def percent(self) -> float | None:
        """Return how much is behind; None outside of all loops."""
        rounds, taken, length = self._rounds, self._taken, self._length
        done, size = 0.0, 100.0
        for one in rounds:
            size /= max(one.count, 1)
            done += size * one.index
        if length:
            done += size * min(1.0, max(0, taken - 1) / length)  # the last one is still in work
        return done if rounds else None


INTERVAL_S = 0.2  # the table is painted twice a second; more reports only cost the launcher
MOST_STEPS = 512  # in one message; of more than these the newest are told

Gauge = Callable[[], float | None]  # None: there is nothing to tell now
_NOTHING: Mapping[str, float] = {}


class Reporter:
    """The progress of this process. Thread-safe; never blocks on the network."""

    def __init__(
        self,
        rank: int,
        send: Callable[[Progress], None],
        sent_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        times_steps: bool = True,
    ) -> None:
        self.steps_done = 0
        self.times_steps = times_steps  # else messages have no StepTimes
        # Since the job began. For others, where who exchanges gradients does not notice it.
        self.waiting = Stopwatch()
        self.input_s = 0.0  # in loaders
        self.samples = 0  # of this worker's batches
        self._rank = rank
        self._send = send
        self._mu = threading.Lock()
        # Hears of every value that the script reports, also of those that are not sent.
        self.listener: Callable[[Mapping[str, float]], None] | None = None
        self._own_step: int | None = None  # guarded by: _mu, like everything below
        self._own_names: set[str] = set()  # of values that the script has reported
        self._gauges: dict[str, Gauge] = {}
        self._ended_s = self._step_s = time.monotonic()  # the last step; the one that is shown
        self._sent_s = float("-inf")
        self._values: dict[str, float] = {}
        self._is_news = False
        self._steps: deque[StepTimes] = deque(maxlen=MOST_STEPS)
        self._before = (0.0, 0.0, 0)  # waited, input, samples when the last step ended
        self._waited_s = 0.0  # where gradients were exchanged
        self._told = (0.0, 0.0, 0.0)  # of all steps that were told of: took, waited, input
        self._counted_input_s = 0.0
        self._meter = Meter(sent_bytes)
        self.books = Books()  # what compression has saved and cost
        self._gauges[CODEC_ERROR] = self.books.lately_missed
        self.headway = Headway()  # in the script's loops
        self._gauges[DONE_SHARE] = self.headway.percent

    def watch(self, name: str, gauge: Gauge) -> None:
        """Read a value whenever a message leaves; by the newest gauge of this name. It is called in
        any thread, must be quick and must not report."""
        with self._mu:
            self._gauges[name] = gauge

    def begin(self) -> None:
        """Let the next step begin now: what was before it (setting up a model) is none of it."""
        with self._mu:
            self._ended_s = time.monotonic()
            self._before = (self.waiting.seconds, self.input_s, self.samples)

    def step_done(
        self,
        values: Mapping[str, float] = _NOTHING,
        took_s: float | None = None,
        waited_s: float = 0.0,
    ) -> None:
        """Count one step. `took_s`: by default since the end of the last one; `waited_s` for others
        in exchanges of gradients and parameters; `waiting` has the rest of it."""
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
        # A loader that is read in another thread may wait while this one computes.
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
        """For how long this rank has waited for others, as far as that is known now."""
        with self._mu:
            return self._waited_s + self.waiting.seconds

    def report(self, step: int | None, values: Mapping[str, float]) -> None:
        """Take in what the script says; `step` None leaves the number of the step as it is."""
        now_s = time.monotonic()
        with self._mu:
            if step is not None:
                self._own_step, self._step_s = step, now_s
            self._own_names.update(values)
            self._take(values, now_s)
        if self.listener is not None:
            self.listener(values)

    def flush(self) -> None:
        """Send what waits for its turn."""
        with self._mu:
            if self._is_news:
                self._send_all(time.monotonic())

    def _take(self, values: Mapping[str, float], now_s: float) -> None:
        self._values.update(values)
        self._is_news = True
        if now_s - self._sent_s >= INTERVAL_S:
            self._send_all(now_s)

    def _send_all(self, now_s: float) -> None:
        values, self._values = {**self._shares(), **self._read_gauges(), **self._values}, {}
        self._is_news, self._sent_s = False, now_s
        step = self.steps_done if self._own_step is None else self._own_step
        age_s, traffic = now_s - self._step_s, self._meter.traffic()
        read = self.books.read(traffic.steps, traffic.trained_s) if traffic is not None else None
        steps = tuple(self._steps)
        self._steps.clear()
        self._send(Progress(self._rank, step, values, age_s, traffic, read, steps))

    def _shares(self) -> dict[str, float]:
        """Return where the time of the steps since the last message went, in percent."""
        told = (self._meter.trained_s, self._meter.waited_s, self._counted_input_s)
        took_s, waited_s, input_s = (
            now - before for now, before in zip(told, self._told, strict=True)
        )
        self._told = told
        if took_s <= 0:
            return {}
        computed = max(0.0, took_s - waited_s - input_s)
        return {COMPUTE_SHARE: 100 * computed / took_s, COMM_SHARE: 100 * waited_s / took_s}

    def _read_gauges(self) -> dict[str, float]:
        if not self.times_steps:
            return {}
        read = {n: gauge() for n, gauge in self._gauges.items() if n not in self._own_names}
        return {name: value for name, value in read.items() if value is not None}
