"""Where the time of steps goes, and which worker the other workers wait for.

A worker's step has three parts: `input` (it waits for its loader), `wait` (it can do nothing but
wait for other processes) and the rest, which is computation. `input` and computation together are
its LOCAL time. In lockstep all workers take the same time for a step, because an all-reduce makes
the fast workers wait for the slow one: the slow worker is not the one whose steps take long, but
the one that waits least. Local time is measured before the exchange, so it shows the difference.

    WaitStats      over the whole run: how long each worker waited for each other worker
    RecentSteps    speed and shares of one worker over the last seconds
    RateWindow     growth of any count (step numbers, bytes) over the last seconds
    EtaEstimator   how long the rest of the script's loop will take

The windows are a few seconds long, so that a stall shows up soon.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeAlias

import msgspec

_OPEN_STEPS = 256  # a step that some worker never reports is closed after this many later ones
_NOTEWORTHY = 0.05  # share of step time that other workers lose before a slow worker is named
_STANDS_OUT = 1.1  # local time relative to the median of the other workers
_NETWORK = 0.15  # share that all workers spend waiting although none of them is slow
WINDOW_S = 8.0
_MAX_CLOCK_SKEW_S = 30.0  # clocks of two hosts that differ by more were never synchronized
_MAX_MARKS = 128  # of an estimate
_ANOTHER_LOOP = 0.5
_FIRST_ESTIMATE_S = 3.0  # an earlier estimate would be too far off


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of one step of one worker went. Computation is the rest of `took_s`."""

    step: int  # as the training hooks count, from 1
    end_s: float  # when it was finished, on the job's clock (observe/telemetry/clock.py)
    took_s: float  # since the end of the previous step
    input_s: float  # of it: waiting for the loader
    wait_s: float  # of it: waiting for other workers or for servers
    samples: int = 0  # of this worker; 0: not counted

    @property
    def local_s(self) -> float:
        """What the step took without waiting for other processes."""
        return max(0.0, self.took_s - self.wait_s)

    @property
    def compute_s(self) -> float:
        return max(0.0, self.took_s - self.wait_s - self.input_s)


@dataclass
class WorkerTimes:
    """Sums over all steps of one worker."""

    steps: int = 0
    samples: int = 0
    took_s: float = 0.0
    input_s: float = 0.0
    wait_s: float = 0.0
    waited_for_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def compute_s(self) -> float:
        return max(0.0, self.took_s - self.wait_s - self.input_s)

    def since(self, before: WorkerTimes) -> WorkerTimes:
        """Return the difference to earlier sums, without `waited_for_s`."""
        return WorkerTimes(
            self.steps - before.steps,
            self.samples - before.samples,
            self.took_s - before.took_s,
            self.input_s - before.input_s,
            self.wait_s - before.wait_s,
        )

    def add(self, step: StepTimes) -> None:
        self.steps += 1
        self.samples += step.samples
        self.took_s += step.took_s
        self.input_s += step.input_s
        self.wait_s += step.wait_s


@dataclass(frozen=True)
class Bottleneck:
    """The worker that costs the other workers most time, and why: "input", "compute", "network"."""

    worker: int | None  # None: no single worker, but the network
    cause: str
    times: float  # its local time relative to the median of the other workers
    cost: float  # share of all workers' time spent waiting
    waited: float = 0.0  # share of the other workers' time spent waiting for it


class WaitStats:
    """Which worker waited for which, over all steps. Workers are numbers. Not thread-safe."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerTimes] = defaultdict(WorkerTimes)
        # By step and worker, until all workers have reported the step.
        self._open: dict[int, dict[int, StepTimes]] = {}

    def add(self, worker: int, steps: Iterable[StepTimes], num_workers: int) -> None:
        """Add steps of a worker; `num_workers` take part in each of them."""
        for step in steps:
            self.workers[worker].add(step)
            reported = self._open.setdefault(step.step, {})
            reported[worker] = step
            if len(reported) >= num_workers:
                self._close(self._open.pop(step.step))
        while len(self._open) > _OPEN_STEPS:
            self._close(self._open.pop(next(iter(self._open))))

    def _close(self, reported: dict[int, StepTimes]) -> None:
        """Attribute the waiting of one step to the worker with the longest local time.

        What that worker itself waits is the network's time, and part of every worker's wait.
        """
        if len(reported) < 2:
            return
        slow = max(reported, key=lambda worker: reported[worker].local_s)
        for worker, step in reported.items():
            if worker != slow:
                self.workers[worker].waited_for_s[slow] += step.wait_s

    def bottleneck(
        self, counted: Mapping[int, Mapping[int, float]] | None = None
    ) -> Bottleneck | None:
        """Return the worker (or the network) that costs most time; None if it costs little.

        With servers, workers wait for the servers, and a slow worker is one of several possible
        reasons. `counted` then holds how long the servers made each worker wait for each other.
        """
        timed = {w: t for w, t in self.workers.items() if t.steps > 1 and t.took_s > 0}
        if len(timed) < 2:
            return None
        cost = sum(t.wait_s for t in timed.values()) / sum(t.took_s for t in timed.values())
        if cost < _NOTEWORTHY:
            return None
        local = {w: (t.took_s - t.wait_s) / t.steps for w, t in timed.items()}
        worst = max(local, key=lambda worker: local[worker])
        rest = [w for w in timed if w != worst]
        times = local[worst] / max(median(local[w] for w in rest), 1e-9)
        waited = self._waited_for(worst, counted)
        if times >= _STANDS_OUT and (counted is None or waited >= _NOTEWORTHY):
            cause = _cause(timed[worst], [timed[w] for w in rest])
            return Bottleneck(worst, cause, times, cost, waited)
        return Bottleneck(None, "network", times, cost) if cost >= _NETWORK else None

    def _waited_for(self, slow: int, counted: Mapping[int, Mapping[int, float]] | None) -> float:
        """Return the share of the other workers' time that they spent waiting for this one."""
        rest = {worker: times for worker, times in self.workers.items() if worker != slow}
        took_s = sum(times.took_s for times in rest.values())
        waited = {w: t.waited_for_s for w, t in rest.items()} if counted is None else counted
        waited_s = sum(waited[worker].get(slow, 0.0) for worker in rest if worker in waited)
        return min(1.0, waited_s / took_s) if took_s > 0 else 0.0


def _cause(worst: WorkerTimes, rest: Sequence[WorkerTimes]) -> str:
    """Return in which part of its steps a worker loses most against the other workers."""
    usual_input_s = median(other.input_s / other.steps for other in rest)
    usual_compute_s = median(other.compute_s / other.steps for other in rest)
    more_input_s = worst.input_s / worst.steps - usual_input_s
    more_compute_s = worst.compute_s / worst.steps - usual_compute_s
    return "input" if more_input_s > more_compute_s else "compute"


class RateWindow:
    """A growing count, over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=256)

    def add(self, at_s: float, count: float) -> None:
        """Add the count at a moment; a smaller count than before starts over."""
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()
        if not self._marks or count > self._marks[-1][1]:
            self._marks.append((at_s, count))

    def per_s(self, now_s: float, *, is_running: bool) -> float | None:
        """Return the current rate, or the last one if it is not running."""
        if len(self._marks) < 2:
            return None
        until_s = now_s if is_running else self._marks[-1][0]
        while len(self._marks) > 2 and until_s - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()
        (first_s, first), (_, last) = self._marks[0], self._marks[-1]
        elapsed_s = until_s - first_s
        return (last - first) / elapsed_s if elapsed_s > 0 else None


_Mark: TypeAlias = tuple[float, WorkerTimes]  # a moment, and the sums up to it


class RecentSteps:
    """The timed steps of one worker, over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=256)

    def add(self, steps: Sequence[StepTimes], now_s: float) -> None:
        """Add the steps of one report."""
        if not steps:
            return
        if not self._marks:  # the first step includes the time before training
            self._marks.append((_end_time(steps[0].end_s, now_s), WorkerTimes()))
            steps = steps[1:]
        if steps:
            sums = replace(self._marks[-1][1])
            for step in steps:
                sums.add(step)
            self._marks.append((_end_time(steps[-1].end_s, now_s), sums))

    def samples_per_s(self, now_s: float, *, is_running: bool) -> float | None:
        """Return the samples per second; None if they are not counted."""
        marks = self._window(now_s if is_running else None)
        if marks is None or not marks[1][1].samples:
            return None
        (first_s, first), (last_s, last) = marks
        elapsed_s = (now_s if is_running else last_s) - first_s
        return (last.samples - first.samples) / elapsed_s if elapsed_s > 0 else None

    def shares(self, now_s: float) -> tuple[float, float] | None:
        """Return the time spent waiting for input and for other processes, in percent."""
        marks = self._window(now_s)
        if marks is None:
            return None
        since = marks[1][1].since(marks[0][1])
        if since.took_s <= 0:
            return None
        percent = 100 / since.took_s
        return min(100.0, percent * since.input_s), min(100.0, percent * since.wait_s)

    def _window(self, until_s: float | None) -> tuple[_Mark, _Mark] | None:
        if len(self._marks) < 2:
            return None
        until_s = self._marks[-1][0] if until_s is None else until_s
        while len(self._marks) > 2 and until_s - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()
        return self._marks[0], self._marks[-1]


class EtaEstimator:
    """Estimates the remaining time of a script's loop from how much of it is done: 0 to 1."""

    def __init__(self) -> None:
        self.done = 0.0
        self._marks: list[tuple[float, float]] = []

    def add(self, at_s: float, done: float) -> None:
        """Add a share. A small step back is ignored: it happens if a round has several passes. A
        large step back means another loop."""
        if done < self.done - _ANOTHER_LOOP:
            self._marks.clear()
        elif self._marks and done <= self.done:
            return
        self.done = min(done, 1.0)
        self._marks.append((at_s, self.done))
        if len(self._marks) > _MAX_MARKS:
            self._marks = self._marks[::2]

    def left_s(self, now_s: float) -> float | None:
        """Return the time left, at the speed of the later half of the elapsed time."""
        if len(self._marks) < 2:
            return None
        last_s, last = self._marks[-1]
        half_s = (self._marks[0][0] + last_s) / 2
        first_s, first = next(m for m in reversed(self._marks[:-1]) if m[0] <= half_s)
        if last_s - first_s < _FIRST_ESTIMATE_S:
            return None
        left_s = (1 - last) * (last_s - first_s) / (last - first)
        return max(0.0, left_s - (now_s - last_s))


def _end_time(end_s: float, now_s: float) -> float:
    """Return when a step ended; the time of its report if the sender's clock is wrong."""
    return end_s if abs(now_s - end_s) < _MAX_CLOCK_SKEW_S else now_s
