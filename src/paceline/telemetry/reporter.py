"""What one rank tells about its progress: collected at every step, sent a few times a second.

Two speak about the same rank. The script reports what it likes (`pl.report`), when it likes; the
training loop's hooks count every step and measure its shares of time. Both land here. What has been
said since the last message is merged by name, the newest value of each, so neither erases the
other's; the display keeps the last value of every name anyway. Between two messages a step costs an
update of a small dictionary.

Steps have one number: the count of `step_done`, until the script gives numbers of its own. From
then on the script's are shown, because those are the ones in its logs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from paceline.telemetry.compression import Books
from paceline.telemetry.events import Progress
from paceline.telemetry.traffic import Meter

INTERVAL_S = 0.1


class Reporter:
    """The progress of this process. Thread-safe; never blocks on the network."""

    def __init__(
        self,
        rank: int,
        send: Callable[[Progress], None],
        sent_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.steps_done = 0
        self._rank = rank
        self._send = send
        self._mu = threading.Lock()
        self._own_step: int | None = None  # guarded by: _mu, like everything below
        self._step_s = time.monotonic()  # when the step that is shown was finished
        self._sent_s = float("-inf")
        self._values: dict[str, float] = {}
        self._is_news = False
        self._meter = Meter(sent_bytes)
        self.books = Books()  # what compression has saved and cost

    def step_done(
        self, values: Mapping[str, float], took_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """Count one step and take in what was measured in it."""
        now_s = time.monotonic()
        with self._mu:
            self.steps_done += 1
            self._meter.step_done(took_s, waited_s)
            if self._own_step is None:
                self._step_s = now_s
            self._take(values, now_s)

    @property
    def waited_s(self) -> float:
        """For how long this rank has waited for others in the steps that were counted."""
        with self._mu:
            return self._meter.waited_s

    def report(self, step: int | None, values: Mapping[str, float]) -> None:
        """Take in what the script says; `step` None leaves the number of the step as it is."""
        now_s = time.monotonic()
        with self._mu:
            if step is not None:
                self._own_step, self._step_s = step, now_s
            self._take(values, now_s)

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
        values, self._values = self._values, {}
        self._is_news, self._sent_s = False, now_s
        step = self.steps_done if self._own_step is None else self._own_step
        age_s, traffic = now_s - self._step_s, self._meter.traffic()
        read = self.books.read(traffic.steps, traffic.trained_s) if traffic is not None else None
        self._send(Progress(self._rank, step, values, age_s, traffic, read))
