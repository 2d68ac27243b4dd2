"""Trace of some steps: what each process did, and when (`paceline run --trace 20:30`).

A SPAN is a stretch of time with a name. Each process has one `tracer`. While it is off, a call site
costs one attribute lookup:

    start_s = tracer.start()              0.0 unless this step is traced
    ...
    if start_s:
        tracer.add("wait", start_s, bucket=3)

Spans of one thread nest, as calls do. Operations that run in parallel to a thread (a collective)
are ASYNC: their spans may overlap, and the writer of the file assigns rows to them. Time of a step
outside of all spans is computation; the writer adds it (observe/record/trace_file.py).

Spans are sent to the launcher about once a second and after the last traced step, so little is lost
if a process dies. Times are those of the sending process; each message holds the offset to the
job's clock.

A process can also SAMPLE its own steps: the spans stay in it, and nothing is sent.

A server counts no steps: workers put the step number into their requests, and the server records
the work for those requests.

Threads: any thread may record. The thread that trains or serves calls `step_done` and `flush`.
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

MAX_SPANS = 200_000  # of one process; then it stops recording and reports that
MAX_STEPS = 10_000
CHUNK = 2000  # spans of one message
FLUSH_S = 1.0
TRAINING = "training"  # row of the training thread
SCOPED, ASYNC, INSTANT = "", "a", "i"

Arg: TypeAlias = str | int | float


class TracedSteps(NamedTuple):
    """Which steps are traced, as the training hooks count them: from 1."""

    first: int
    stop: int  # the first one that is not

    @classmethod
    def parse(cls, text: str, option: str = "--trace") -> TracedSteps:
        """Parse "20:30"; raise ConfigError with the correct form."""
        found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text.strip(), re.ASCII)
        hint = f"write {option} FIRST:STOP, for example {option} 20:30 for steps 20 to 29"
        if found is None:
            raise ConfigError(f"{option} {text!r:.60}: {hint}")
        steps = cls(int(found[1]), int(found[2]))
        if steps.first < 1:
            raise ConfigError(f"{option} {steps}: steps are counted from 1; {hint}")
        if steps.stop <= steps.first:
            raise ConfigError(f"{option} {steps}: the range is empty; {hint}")
        if steps.stop - steps.first > MAX_STEPS:
            raise ConfigError(f"{option} {steps}: the limit is {MAX_STEPS} steps; {hint}")
        return steps

    def __str__(self) -> str:
        return f"{self.first}:{self.stop}"

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step < self.stop

    @property
    def text(self) -> str:
        """As text: "steps 20 to 29"."""
        last = self.stop - 1
        return f"step {last}" if last == self.first else f"steps {self.first} to {last}"


class TraceSpan(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of time with a name; an instant has no duration."""

    name: str
    row: str  # the thread, or an operation that runs in parallel to it
    start_s: float  # of time.monotonic() in the process that recorded it
    took_s: float
    step: int
    kind: str = SCOPED
    args: dict[str, Arg] = {}


class Spans(msgspec.Struct, frozen=True, tag_field="type", tag="spans"):
    """A batch of recorded spans of a process."""

    rank: int
    offset_s: float  # to be added to its times to get the job's clock
    spans: tuple[TraceSpan, ...] = ()
    part: str = ""  # on a mesh: which shard of the model it holds
    is_cut: bool = False  # it has reached MAX_SPANS and stopped recording


class Tracer:
    """Records the spans of this process."""

    def __init__(self) -> None:
        self.on = False  # this step is traced or sampled; every call site reads it
        self.is_planned = False  # some steps are
        self._is_sent = False  # some steps are traced for the launcher
        self._is_traced = False  # this one is
        self._samples: list[list[TraceSpan]] = []
        self.step = 0  # the current one, while it is traced
        self._steps = TracedSteps(0, 0)
        self._rank = -1
        self._part = ""
        self._send: Callable[[Spans], None] = lambda _: None
        self._spans: list[TraceSpan] = []  # appended to by any thread, taken by `flush`
        self._num_spans = 0
        self._is_cut = self._has_sent_cut = False
        self._began_s = 0.0  # start of the current step
        self._flushed_s = 0.0
        self._training = 0  # id of the training thread

    # -- which steps --------------------------------------------------------------------------

    def plan(self, steps: TracedSteps, rank: int, send: Callable[[Spans], None]) -> None:
        """Trace these steps; `send` must not block. Called by the training thread."""
        self.stop()
        self.is_planned, self._is_sent = True, True
        self._steps, self._rank, self._send = steps, rank, send
        self._num_spans, self._is_cut, self._has_sent_cut = 0, False, False
        self._training = threading.get_ident()
        self.begin(0)

    def begin(self, steps_done: int, part: str = "") -> None:
        """Begin the next step now, without the time before it (setting up a model)."""
        self._part = part or self._part
        self._began_s = self._flushed_s = time.monotonic()
        self._enter_step(steps_done + 1)

    def step_done(self, steps_done: int) -> None:
        """Record the finished step; enter the next one."""
        now_s = time.monotonic()
        if self.on:
            took_s = now_s - self._began_s
            self._put(TraceSpan(f"step {steps_done}", TRAINING, self._began_s, took_s, steps_done))
        self._began_s = now_s
        was_traced = self._is_traced
        self._enter_step(steps_done + 1)
        if was_traced and (not self._is_traced or now_s - self._flushed_s > FLUSH_S):
            self.flush()

    def stop(self) -> None:
        """Stop tracing and drop what was not sent; also called in a forked child."""
        self.on = self.is_planned = self._is_sent = self._is_traced = False
        self._spans, self._samples = [], []

    def sample(self, steps_done: int) -> list[TraceSpan]:
        """Record all steps from the next one on into a list, until `end_sample`."""
        spans: list[TraceSpan] = []
        self._samples.append(spans)
        self.is_planned = True
        self.begin(steps_done)
        return spans

    def end_sample(self, spans: list[TraceSpan]) -> None:
        """Stop recording into a list that `sample` returned."""
        self._samples = [one for one in self._samples if one is not spans]
        self.is_planned = self._is_sent or bool(self._samples)
        self.on = self._is_traced or bool(self._samples)

    def _enter_step(self, step: int) -> None:
        self._is_traced = self._is_sent and not self._is_cut and step in self._steps
        self.on = self._is_traced or bool(self._samples)
        self.step = step if self.on else 0

    # -- recording ----------------------------------------------------------------------------

    def start(self) -> float:
        """Return the time if this step is traced, else 0.0."""
        return time.monotonic() if self.on else 0.0

    def add(self, name: str, start_s: float, **args: Arg) -> None:
        """Record a span of this thread since `start_s`."""
        took_s = time.monotonic() - start_s
        self._put(TraceSpan(name, self._row(), start_s, took_s, self.step, SCOPED, args))

    def add_async(
        self, row: str, name: str, start_s: float, end_s: float, step: int = 0, **args: Arg
    ) -> None:
        """Record an operation that ran in parallel to the threads, in a row of that name."""
        took_s = max(0.0, end_s - start_s)
        self._put(TraceSpan(name, row, start_s, took_s, step or self.step, ASYNC, args))

    def mark(self, name: str, at_s: float, **args: Arg) -> None:
        """Record an instant."""
        self._put(TraceSpan(name, self._row(), at_s, 0.0, self.step, INSTANT, args))

    def serve(self, name: str, start_s: float, step: int, **args: Arg) -> None:
        """Record what this server did for a worker's step since `start_s`."""
        took_s = time.monotonic() - start_s
        self._put(TraceSpan(name, "serving", start_s, took_s, step, SCOPED, args))

    def _row(self) -> str:
        if threading.get_ident() == self._training:
            return TRAINING
        return threading.current_thread().name

    def _put(self, span: TraceSpan) -> None:
        for sample in self._samples:
            sample.append(span)
        if not self._is_sent or (span.step and span.step not in self._steps):
            return
        if self._num_spans >= MAX_SPANS:
            self._is_cut, self._is_traced = True, False
            self.on = bool(self._samples)
            return
        self._num_spans += 1
        self._spans.append(span)

    # -- sending ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the recorded spans. Does not block: the agent's thread encodes and sends."""
        self._flushed_s = time.monotonic()
        if not self._spans and self._is_cut == self._has_sent_cut:
            return
        spans, self._spans = self._spans, []
        offset_s, self._has_sent_cut = clock.offset_s(), self._is_cut
        for first in range(0, max(len(spans), 1), CHUNK):
            chunk = tuple(spans[first : first + CHUNK])
            self._send(Spans(self._rank, offset_s, chunk, self._part, self._is_cut))


tracer = Tracer()


class Stopwatch:
    """Total seconds, which only grow: the time of a step is a difference of two readings.

    May be nested: nested time counts once. Main thread only.
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
