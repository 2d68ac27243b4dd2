"""Where the time of steps goes, and whose fault it is.

A worker's step has three parts: `input` (it waits for its loader), `wait` (it has nothing to do but
wait for others) and the rest, which it computes. `input` and computing together are its LOCAL time.
In lockstep all workers take the same time for a step, because an all-reduce makes the fast ones
wait for the slow one: the culprit is not who takes long, but who waits least. Local time is
measured before the exchange, so it tells them apart.

`Waits` is fed with the steps of all workers, in any order, and knows who waited for whom.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

_OPEN_STEPS = 256  # a step that some worker never tells about is given up behind so many others
_NOTEWORTHY = 0.05  # of its steps' time that others must lose to the slowest before it is named
_STANDS_OUT = 1.1  # times the others' local time
_NETWORK = 0.15  # share that all spend waiting, though nobody is slow


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of one step of one worker went. The computing is what is left of `took_s`."""

    step: int  # as the training hooks count, from 1
    end_s: float  # when it was finished, on the job's clock (observe/telemetry/clock.py)
    took_s: float  # since the end of the step before
    input_s: float  # of it: waiting for the loader
    wait_s: float  # of it: waiting for other workers, or for servers
    samples: int = 0  # of this worker; 0 where nobody counts them

    @property
    def local_s(self) -> float:
        """What the step took without waiting for others."""
        return max(0.0, self.took_s - self.wait_s)

    @property
    def compute_s(self) -> float:
        return max(0.0, self.took_s - self.wait_s - self.input_s)


@dataclass
class WorkerTimes:
    """The sums of one worker, over all of its steps."""

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
        """Return what was added since these sums were kept; without for whom it waited."""
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
class Slowest:
    """The worker that costs the others most, and why: "input", "compute", "network"."""

    worker: int | None  # None: nobody in particular, it is the network
    cause: str
    times: float  # its local time, in those of the others' median
    cost: float  # share of all workers' time that went into waiting
    waited: float = 0.0  # share of the others' time in which they waited for it


class Waits:
    """Who waited for whom, over all steps. Workers have numbers. Not thread-safe."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerTimes] = defaultdict(WorkerTimes)
        self._open: dict[int, dict[int, StepTimes]] = {}  # by step and worker, until all have told

    def add(self, worker: int, steps: Iterable[StepTimes], num_workers: int) -> None:
        """Take in steps of a worker; `num_workers` says how many take part in a step now."""
        for step in steps:
            self.workers[worker].add(step)
            told = self._open.setdefault(step.step, {})
            told[worker] = step
            if len(told) >= num_workers:
                self._settle(self._open.pop(step.step))
        while len(self._open) > _OPEN_STEPS:
            self._settle(self._open.pop(next(iter(self._open))))

    def _settle(self, told: dict[int, StepTimes]) -> None:
        """All wait for the one whose local time is longest; what it waits itself is the network's
        time, and everybody's."""
        if len(told) < 2:
            return
        culprit = max(told, key=lambda worker: told[worker].local_s)
        for worker, step in told.items():
            if worker != culprit:
                self.workers[worker].waited_for_s[culprit] += step.wait_s

    def slowest(self, told: Mapping[int, Mapping[int, float]] | None = None) -> Slowest | None:
        """Name who or what costs most; None when nothing is worth a word.

        With servers a worker waits for those, and a slow worker is one of several possible reasons:
        `told` is for whom they let each worker wait, and how long.
        """
        timed = {w: t for w, t in self.workers.items() if t.steps > 1 and t.took_s > 0}
        if len(timed) < 2:
            return None
        cost = sum(t.wait_s for t in timed.values()) / sum(t.took_s for t in timed.values())
        if cost < _NOTEWORTHY:
            return None
        local = {w: (t.took_s - t.wait_s) / t.steps for w, t in timed.items()}
        worst = max(local, key=lambda worker: local[worker])
        others = [w for w in timed if w != worst]
        times = local[worst] / max(median(local[w] for w in others), 1e-9)
        waited = self._waited_for(worst, told)
        if times >= _STANDS_OUT and (told is None or waited >= _NOTEWORTHY):
            cause = _cause(timed[worst], [timed[w] for w in others])
            return Slowest(worst, cause, times, cost, waited)
        return Slowest(None, "network", times, cost) if cost >= _NETWORK else None

    def _waited_for(self, whom: int, told: Mapping[int, Mapping[int, float]] | None) -> float:
        """Return the share of the others' time in which they waited for this one."""
        others = {worker: times for worker, times in self.workers.items() if worker != whom}
        took_s = sum(times.took_s for times in others.values())
        waited = {w: t.waited_for_s for w, t in others.items()} if told is None else told
        waited_s = sum(waited[worker].get(whom, 0.0) for worker in others if worker in waited)
        return min(1.0, waited_s / took_s) if took_s > 0 else 0.0


def _cause(worst: WorkerTimes, others: Sequence[WorkerTimes]) -> str:
    """Say in which part of its steps a worker loses most against the others."""
    usual_input_s = median(other.input_s / other.steps for other in others)
    usual_compute_s = median(other.compute_s / other.steps for other in others)
    more_input_s = worst.input_s / worst.steps - usual_input_s
    more_compute_s = worst.compute_s / worst.steps - usual_compute_s
    return "input" if more_input_s > more_compute_s else "compute"
