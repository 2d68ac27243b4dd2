"""Lines of any length in bounded memory: values in bins that widen as the line gets longer.

A BIN holds the values within one stretch of the x axis: their number, sum, minimum and maximum, and
where those two were. There are at most `capacity` bins; a value beyond the last bin doubles the
width of all bins, and two neighbours become one. So a file is read once, a line of a million values
needs as much memory as one of ten, and neither loses its peaks. Widths are the first width times a
power of two, and the lines of a plot start at the same x, their ORIGIN: they can be brought to the
same bins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.observe.telemetry.step_times import StepTimes

_MAX_STEPS = 64  # to choose a typical one from
LINES = 16  # workers with their own line; with more, only range and mean are drawn


@dataclass
class Bin:
    """Values of one stretch of the x axis."""

    count: int
    total: float
    low: float
    high: float
    low_x: float
    high_x: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def x(self) -> float:
        return (self.low_x + self.high_x) / 2

    def take(self, other: Bin) -> None:
        self.count += other.count
        self.total += other.total
        if other.low < self.low:
            self.low, self.low_x = other.low, other.low_x
        if other.high > self.high:
            self.high, self.high_x = other.high, other.high_x


class Series:
    """One line. `x` should mostly grow; an x before `origin` counts as `origin`."""

    def __init__(self, width: float, origin: float = 0.0, capacity: int = 300) -> None:
        self.width = width
        self.origin = origin
        self.bins: dict[int, Bin] = {}
        self._capacity = capacity

    def add(self, x: float, y: float) -> None:
        """Add a value."""
        x = max(x, self.origin)
        while x - self.origin >= self.width * self._capacity:
            self.widen()
        self._put(int((x - self.origin) / self.width), Bin(1, y, y, y, x, x))

    def _put(self, at: int, new: Bin) -> None:
        here = self.bins.get(at)
        if here is None:
            self.bins[at] = new
        else:
            here.take(new)

    def widen(self) -> None:
        """Merge every two bins."""
        bins, self.bins = self.bins, {}
        self.width *= 2
        for at, one in bins.items():
            self._put(at // 2, one)

    def coarsened(self, width: float) -> Series:
        """Return a copy whose bins are at least that wide."""
        copy = Series(self.width, self.origin, self._capacity)
        copy.bins = {at: Bin(**vars(one)) for at, one in self.bins.items()}
        while copy.width < width:
            copy.widen()
        return copy

    def in_order(self) -> list[Bin]:
        return [self.bins[at] for at in sorted(self.bins)]

    def points(self) -> list[tuple[float, float]]:
        """Return a line through the lowest and the highest value of every bin."""
        points = []
        for one in self.in_order():
            ends = {(one.low_x, one.low), (one.high_x, one.high)}
            points += sorted(ends)
        return points


class Curve:
    """A value of several workers, over time, samples or steps."""

    def __init__(self, width: float) -> None:
        self._width = width
        self.all = Series(width)  # its origin is the first value's
        self.workers: dict[int, Series] = {}
        self.is_crowded = False  # more workers than lines
        self.last: dict[int, float] = {}
        self.num_bad = 0  # values that are not finite
        self.first_bad: tuple[float, int] | None = None  # x and worker

    def add(self, worker: int, x: float, y: float | None) -> None:
        """Add a value of a worker; None: it cannot be drawn."""
        if y is None:
            self.num_bad += 1
            self.last[worker] = float("nan")
            self.first_bad = self.first_bad or (x, worker)
            return
        self.last[worker] = y
        if not self.all.bins:
            self.all.origin = x
        self.all.add(x, y)
        line = self.workers.get(worker)
        if line is None and len(self.workers) < LINES:
            line = self.workers[worker] = Series(self._width, self.all.origin)
        if line is None:
            self.is_crowded = True
        else:
            line.add(x, y)

    def mean(self) -> list[tuple[float, float]]:
        """Return the mean over the workers; each keeps its value until its next one."""
        if self.is_crowded:
            return [(one.x, one.mean) for one in self.all.in_order()]
        width = max((line.width for line in self.workers.values()), default=self._width)
        lines = [line.coarsened(width) for line in self.workers.values()]
        return _mean_of(lines, self.all.coarsened(width))


def _mean_of(lines: Sequence[Series], every: Series) -> list[tuple[float, float]]:
    firsts, ends = [min(line.bins) for line in lines], [max(line.bins) for line in lines]
    # A worker without a value for some of its usual intervals counts as gone.
    spans = zip(lines, firsts, ends, strict=True)
    patience = [2 + 2 * (end - first) / max(len(line.bins) - 1, 1) for line, first, end in spans]
    # Until all workers that start together have a value, the mean would jump with each of them.
    together = min(firsts, default=0) + max(patience, default=0)
    begin = max((first for first in firsts if first <= together), default=0)
    now: dict[int, float] = {}
    points = []
    for at in sorted(every.bins):
        for number, line in enumerate(lines):
            if at in line.bins:
                now[number] = line.bins[at].mean
            elif at > ends[number] + patience[number]:
                now.pop(number, None)
        if now and at >= begin:
            points.append((every.bins[at].x, sum(now.values()) / len(now)))
    return points


@dataclass
class Rate:
    """Amounts spread over stretches of time: how much of each kind falls into each bin."""

    kinds: int
    width: float = 1e-3
    capacity: int = 240
    bins: dict[int, list[float]] = field(default_factory=dict)
    begin: float | None = None  # of the first stretch: bin 0 starts there
    end: float = 0.0

    def spread(self, begin: float, end: float, amounts: Sequence[float]) -> None:
        """Distribute amounts over the bins between two moments."""
        if self.begin is None:
            self.begin = begin
        self.end = max(self.end, end)
        begin, end = max(begin - self.begin, 0.0), max(end - self.begin, 0.0)
        while end >= self.width * self.capacity:
            self._widen()
        first, last = int(begin / self.width), int(end / self.width)
        if first == last:
            self._put(first, 1.0, amounts)
            return
        for at in range(first, last + 1):
            inside = min(end, (at + 1) * self.width) - max(begin, at * self.width)
            self._put(at, inside / (end - begin), amounts)

    def _put(self, at: int, part: float, amounts: Sequence[float]) -> None:
        here = self.bins.get(at)
        if here is None:
            here = self.bins[at] = [0.0] * self.kinds
        for kind, amount in enumerate(amounts):
            here[kind] += part * amount

    def _widen(self) -> None:
        self.width *= 2
        wide: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * self.kinds)
        for at, amounts in self.bins.items():
            wide[at // 2] = [a + b for a, b in zip(wide[at // 2], amounts, strict=True)]
        self.bins = dict(wide)

    def coarsen(self, most: int) -> None:
        """Widen the bins until there are at most `most`."""
        while len(self.bins) > most:
            self._widen()

    def stretches(self) -> Iterable[tuple[float, float, list[float]]]:
        """Yield begin, end and amounts of every bin, limited to the run."""
        if self.begin is None:
            return
        for at in range(max(self.bins) + 1):
            begin = self.begin + at * self.width
            end = min(begin + self.width, self.end)
            if end - begin > 0.05 * self.width or len(self.bins) == 1:
                yield begin, end, self.bins.get(at, [0.0] * self.kinds)


class TypicalStep:
    """Finds one step to show in detail: the one with the median duration.

    The median is known only at the end, and memory is bounded. So every n-th step is kept with the
    times of all its workers, and n doubles whenever there are too many: some dozens of complete
    steps are enough to find a typical one.
    """

    def __init__(self) -> None:
        self._every = 1
        self._kept: dict[int, dict[int, StepTimes]] = {}

    def add(self, worker: int, step: StepTimes) -> None:
        """Add a step of a worker."""
        if step.step % self._every or step.took_s <= 0:
            return
        self._kept.setdefault(step.step, {})[worker] = step
        while len(self._kept) > _MAX_STEPS:
            self._every *= 2
            self._kept = {at: times for at, times in self._kept.items() if at % self._every == 0}

    def choose(self) -> dict[int, StepTimes]:
        """Return the times of all workers in a typical step; {} without steps.

        The first step is left out if there are others, because it includes setup.
        """
        steps = {at: workers for at, workers in self._kept.items() if at > 1} or self._kept
        if not steps:
            return {}
        most = max(len(workers) for workers in steps.values())
        complete = [workers for workers in steps.values() if len(workers) == most]
        complete.sort(key=lambda workers: max(step.took_s for step in workers.values()))
        return dict(sorted(complete[len(complete) // 2].items()))
