"""The trace of some steps: what each process did, from when to when (`paceline run --trace 20:30`).

A SPAN is a stretch of time with a name. A process has one `tracer`. Off, a place that could record
costs a look at one attribute:

    start_s = tracer.start()              0.0 unless these steps are traced
    ...
    if start_s:
        tracer.add("wait", start_s, bucket=3)

Spans of one thread nest, as calls do. What goes on beside a thread (a collective under way) is
ASYNC: such spans may overlap, and a reader finds rows for them. What is left of a step between its
spans is computing; nobody records that, the writer of the file sees it
(observe/record/trace_file.py).

Spans are sent to the launcher about once a second, and when the last step of the trace is done: of
a process that dies, little is lost. Times are those of this process; a message says what has to be
added to them for the job's clock.

On a server nobody counts steps: workers put the step into the requests that they make meanwhile,
and the server records what it does for those.

Threads: any may record. One, which trains or serves, calls `step_done` and `flush`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, TypeAlias

import msgspec

from paceline.errors import ConfigError
from paceline.observe.telemetry import clock

MOST_SPANS = 200_000  # of one process; it stops there, and says so
MOST_STEPS = 10_000
CHUNK = 2000  # spans of one message
FLUSH_S = 1.0
TRAINING = "training"  # the row of the thread that trains
SCOPED, ASYNC, INSTANT = "", "a", "i"

Arg: TypeAlias = str | int | float


class TracedSteps(NamedTuple):
    """Which steps are traced, as the training hooks count them: from 1."""

    first: int
    stop: int  # the first one that is not

    @classmethod
    def parse(cls, text: str, option: str = "--trace") -> TracedSteps:
        """Read "20:30"; ConfigError says what to write instead."""
        found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text.strip(), re.ASCII)
        hint = f"write {option} FIRST:STOP, for example {option} 20:30 for steps 20 to 29"
        if found is None:
            raise ConfigError(f"{option} {text!r:.60}: {hint}")
        steps = cls(int(found[1]), int(found[2]))
        if steps.first < 1:
            raise ConfigError(f"{option} {steps}: steps are counted from 1; {hint}")
        if steps.stop <= steps.first:
            raise ConfigError(f"{option} {steps}: there is no step in it; {hint}")
        if steps.stop - steps.first > MOST_STEPS:
            raise ConfigError(f"{option} {steps}: at most {MOST_STEPS} steps are traced; {hint}")
        return steps

    def __str__(self) -> str:
        return f"{self.first}:{self.stop}"

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step < self.stop

    @property
    def words(self) -> str:
        """For people: "steps 20 to 29"."""
        last = self.stop - 1
        return f"step {last}" if last == self.first else f"steps {self.first} to {last}"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time; an instant took none."""

    name: str
    row: str  # the thread, or what goes on beside it
    start_s: float  # of time.monotonic() in the process that recorded it
    took_s: float
    step: int
    kind: str = SCOPED
    args: dict[str, Arg] = {}


class Spans(msgspec.Struct, frozen=True, tag_field="type", tag="spans"):
    """Some of what a process has recorded."""

    rank: int
    offset_s: float  # to be added to its times: the job's clock
    spans: tuple[Span, ...] = ()
    part: str = ""  # on a mesh: which part of the model it holds; those of one part exchange it
    is_cut: bool = False  # it has recorded so much that it stopped


class Tracer:
    """Records the spans of this process."""

    def __init__(self) -> None:
        self.on = False  # these steps are traced: what every place looks at
        self.is_planned = False  # there is a trace, of these or other steps
        self.step = 0  # the one under way, while it is traced
        self._steps = TracedSteps(0, 0)
        self._rank = -1
        self._part = ""
        self._send: Callable[[Spans], None] = lambda _: None
        self._spans: list[Span] = []  # appended to by any thread, taken by `flush`
        self._num_spans = 0
        self._is_cut = self._has_told_cut = False
        self._began_s = 0.0  # when the step under way did
        self._flushed_s = 0.0
        self._training = 0  # the thread that trains

    # -- which steps --------------------------------------------------------------------------

    def plan(self, steps: TracedSteps, rank: int, send: Callable[[Spans], None]) -> None:
        """Trace these steps; `send` must not block. Called by the thread that trains."""
        self.stop()
        self.is_planned, self._steps, self._rank, self._send = True, steps, rank, send
        self._num_spans, self._is_cut, self._has_told_cut = 0, False, False
        self._training = threading.get_ident()
        self.begin(0)

    def begin(self, steps_done: int, part: str = "") -> None:
        """Let the next step begin now: what was before it (setting up a model) is none of it."""
        self._part = part or self._part
        self._began_s = self._flushed_s = time.monotonic()
        self._look_at(steps_done + 1)

    def step_done(self, steps_done: int) -> None:
        """Record the step that has ended, and look whether the next one is traced."""
        now_s = time.monotonic()
        if self.on:
            self._put(Span(f"step {steps_done}", TRAINING, self._began_s, now_s - self._began_s,
                           steps_done))  # fmt: skip
        self._began_s = now_s
        was_on = self.on
        self._look_at(steps_done + 1)
        if was_on and (not self.on or now_s - self._flushed_s > FLUSH_S):
            self.flush()

    def stop(self) -> None:
        """Trace no more, and forget what was not sent; also in a forked child."""
        self.on = self.is_planned = False
        self._spans = []

    def _look_at(self, step: int) -> None:
        self.on = self.is_planned and not self._is_cut and step in self._steps
        self.step = step if self.on else 0

    # -- recording ----------------------------------------------------------------------------

    def start(self) -> float:
        """Return the time if it is to be recorded what follows, else 0.0."""
        return time.monotonic() if self.on else 0.0

    def add(self, name: str, start_s: float, **args: Arg) -> None:
        """Record what this thread has done since `start_s`."""
        took_s = time.monotonic() - start_s
        self._put(Span(name, self._row(), start_s, took_s, self.step, SCOPED, args))

    def add_beside(
        self, row: str, name: str, start_s: float, end_s: float, step: int = 0, **args: Arg
    ) -> None:
        """Record what went on beside the threads, in a row of that name."""
        took_s = max(0.0, end_s - start_s)
        self._put(Span(name, row, start_s, took_s, step or self.step, ASYNC, args))

    def mark(self, name: str, at_s: float, **args: Arg) -> None:
        """Record that something happened."""
        self._put(Span(name, self._row(), at_s, 0.0, self.step, INSTANT, args))

    def serve(self, name: str, start_s: float, step: int, **args: Arg) -> None:
        """Record what this server has done since `start_s` for a worker's step."""
        took_s = time.monotonic() - start_s
        self._put(Span(name, "serving", start_s, took_s, step, SCOPED, args))

    def _row(self) -> str:
        if threading.get_ident() == self._training:
            return TRAINING
        return threading.current_thread().name

    def _put(self, span: Span) -> None:
        if self._num_spans >= MOST_SPANS:
            self._is_cut, self.on = True, False
            return
        self._num_spans += 1
        self._spans.append(span)

    # -- sending ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what there is. Does not block; encoding and sending are the sender's."""
        self._flushed_s = time.monotonic()
        if not self._spans and self._is_cut == self._has_told_cut:
            return
        spans, self._spans = self._spans, []
        offset_s, self._has_told_cut = clock.offset_s(), self._is_cut
        for first in range(0, max(len(spans), 1), CHUNK):
            chunk = tuple(spans[first : first + CHUNK])
            self._send(Spans(self._rank, offset_s, chunk, self._part, self._is_cut))


tracer = Tracer()


class Stopwatch:
    """Seconds so far, which only grow: whoever wants those of a step takes the difference.

    May be nested: what is inside counts once. Main thread only.
    """

    __slots__ = ("_depth", "_start_s", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._start_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._start_s = time.perf_counter()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            took_s = time.perf_counter() - self._start_s
            self.seconds += took_s
            if tracer.on:
                tracer.add("wait", time.monotonic() - took_s)
