"""From events to curves: a sample per second of each worker, each server, and the job.

Workers tell about every step; TensorBoard and Prometheus want a number now and then. Whatever can
be is measured between two samples, so a curve shows what is going on and not what went on before.
Plain data with the time passed in; no files here.

Shares are of the time of a worker's steps. `waiting/for worker k` is one too: as servers have
counted it, or, in jobs without servers, as the workers' steps tell it (telemetry/steps.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.launcher.seat import Seat
from paceline.telemetry import staleness
from paceline.telemetry.events import (
    CODEC_ERROR,
    COMM_SHARE,
    COMPUTE_SHARE,
    DONE_SHARE,
    STALENESS,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Progress,
    ServerLoad,
)
from paceline.telemetry.record import Recorded
from paceline.telemetry.staleness import TableReport
from paceline.telemetry.steps import Waits, WorkerTimes

JOB = ("job", 0)
STEPS_S, SAMPLES_S = "throughput/steps per s", "throughput/samples per s"
WAIT, INPUT, COMPUTE = "time/wait share", "time/input share", "time/compute share"
BYTES_S, BYTES_SENT = "traffic/bytes per s", "traffic/bytes sent"
CODEC, RATIO = "compression/codec error", "compression/ratio"
STALE = "staleness"
QUEUE, BUSY, REQUESTS_S = "server/queue", "server/busy", "server/requests per s"
WORKERS = "workers"
_MEASURED_ELSEWHERE = {COMPUTE_SHARE, COMM_SHARE, CODEC_ERROR, STALENESS, DONE_SHARE}
_MOST_NAMES = 200  # of a worker's values: a script may put a number into each name

Who = tuple[str, int]  # role and number


@dataclass
class Sample:
    """What is new about one worker, server or job; `reported` has the names that a script chose."""

    who: Who
    step: int
    measured: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)  # of updates since the last sample


@dataclass
class _Worker:
    step: int = 0
    reported: dict[str, float] = field(default_factory=dict)  # the newest of each name
    told: dict[str, float] = field(default_factory=dict)  # of them, since the last sample
    since: WorkerTimes = field(default_factory=WorkerTimes)  # steps since the last sample
    has_times: bool = False
    mark: tuple[float, int, int] | None = None  # time, step and bytes at the last sample
    last: tuple[float, int, int] = (0.0, 0, 0)  # the same, now
    measured: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)  # as it was last measured
    is_news: bool = False


class Measures:
    """Fed with every event; not thread-safe."""

    def __init__(self, seats: Iterable[Seat]) -> None:
        self._who: dict[int, Who] = {seat.rank: (seat.role, seat.number) for seat in seats}
        self.alive = {number for role, number in self._who.values() if role == "worker"}
        self._workers: dict[int, _Worker] = {}
        self._servers: dict[Who, Sample] = {}
        self._waits = Waits()
        self._waited: dict[int, Mapping[int, float]] = {}  # by worker, for whom: at the last sample
        self._tables: dict[tuple[str, int], TableReport] = {}
        self._is_table_news = False
        self._stale: dict[int, Counter[int]] = {}  # by worker, at the last sample
        self._sampled_s = 0.0

    def take(self, t: float, event: Recorded) -> None:
        """Take in one event."""
        if isinstance(event, Progress):
            self._progressed(t, event)
        elif isinstance(event, TableReport):
            self._tables[event.table, event.server] = event
            self._is_table_news = True
        elif isinstance(event, ServerLoad):
            measured = {BUSY: event.busy, REQUESTS_S: event.requests_s, QUEUE: float(event.queued)}
            measured[BYTES_S] = event.bytes_s
            who = ("server", event.server)
            self._servers[who] = Sample(who, 0, measured)
        elif isinstance(event, MemberJoined):
            self._who[event.rank] = (event.role, event.number)
        elif isinstance(event, MemberLost | MemberLeft) and event.role == "worker":
            self.alive.discard(event.number)

    def _progressed(self, t: float, event: Progress) -> None:
        role, number = self._who.get(event.rank, ("", 0))
        if role != "worker":
            return
        self.alive.add(number)
        worker = self._workers.setdefault(number, _Worker())
        if event.step < worker.step:  # the script began to count anew
            worker.mark = None
        worker.step, worker.is_news = event.step, True
        for name, value in event.values.items():
            if name in _MEASURED_ELSEWHERE:
                continue
            if name in worker.reported or len(worker.reported) < _MOST_NAMES:
                worker.reported[name] = worker.told[name] = value
        for step in event.steps:
            worker.since.add(step)
            worker.has_times = True
        if event.steps and not self._tables:
            self._waits.add(number, event.steps, len(self.alive))
        sent = event.traffic.num_bytes if event.traffic is not None else 0
        worker.last = (t - event.age_s, event.step, sent)
        worker.mark = worker.mark or worker.last
        if event.traffic is not None:
            worker.measured[BYTES_SENT] = sent
        if event.compression is not None and event.compression.sent_bytes:
            worker.measured[RATIO] = event.compression.plain_bytes / event.compression.sent_bytes
        if CODEC_ERROR in event.values:
            worker.measured[CODEC] = event.values[CODEC_ERROR]
        if STALENESS in event.values:
            worker.measured[STALE] = event.values[STALENESS]

    def sample(self, t: float) -> list[Sample]:
        """Return what is new since the last call."""
        samples = [
            self._sample_worker(number, worker)
            for number, worker in self._workers.items()
            if worker.is_news
        ]
        if self._is_table_news:
            self._add_tables(samples, t - self._sampled_s)
        if samples:
            samples.append(self._sample_job())
        step = max((worker.step for worker in self._workers.values()), default=0)
        for server in self._servers.values():
            server.step = step
            samples.append(server)
        self._servers.clear()
        self._sampled_s = t
        return samples

    def _sample_worker(self, number: int, worker: _Worker) -> Sample:
        sample = Sample(("worker", number), worker.step, worker.measured, worker.told)
        since, measured = worker.since, sample.measured
        assert worker.mark is not None
        elapsed_s = worker.last[0] - worker.mark[0]
        if since.took_s > 0:
            measured[STEPS_S] = since.steps / since.took_s
            measured[WAIT] = since.wait_s / since.took_s
            measured[INPUT] = since.input_s / since.took_s
            measured[COMPUTE] = since.compute_s / since.took_s
            if since.samples:
                measured[SAMPLES_S] = since.samples / since.took_s
            if not self._tables:
                waited = self._waits.workers[number].waited_for_s
                self._tell_waits(sample, waited, since.took_s)
        elif not worker.has_times and elapsed_s > 0:
            measured[STEPS_S] = (worker.last[1] - worker.mark[1]) / elapsed_s
        if elapsed_s > 0 and worker.last[2] > worker.mark[2]:
            measured[BYTES_S] = (worker.last[2] - worker.mark[2]) / elapsed_s
        worker.latest.update(measured)
        worker.mark, worker.is_news = worker.last, False
        worker.since, worker.measured, worker.told = WorkerTimes(), {}, {}
        return sample

    def _tell_waits(self, sample: Sample, waited: Mapping[int, float], elapsed_s: float) -> None:
        """Add for whom a worker has waited since the last sample, as shares of the time."""
        before: Mapping[int, float] = self._waited.get(sample.who[1], {})
        for whom, waited_s in waited.items():
            more_s = waited_s - before.get(whom, 0.0)
            if more_s > 0 and elapsed_s > 0:
                sample.measured[f"waiting/for worker {whom}"] = min(1.0, more_s / elapsed_s)
        self._waited[sample.who[1]] = dict(waited)

    def _add_tables(self, samples: list[Sample], elapsed_s: float) -> None:
        """Add what servers counted about each worker, over all tables."""
        self._is_table_news = False
        ages: dict[int, Counter[int]] = {}
        waited: dict[int, dict[int, float]] = {}
        for report in staleness.merge(list(self._tables.values())):
            for one in report.workers:
                ages.setdefault(one.worker, Counter()).update(one.staleness)
                of_worker = waited.setdefault(one.worker, defaultdict(float))
                for whom, waited_s in one.waited_s.items():
                    of_worker[whom] += waited_s
        found = {sample.who[1]: sample for sample in samples}
        for number, counts in ages.items():
            sample = found.get(number)
            if sample is None:
                known = self._workers.get(number, _Worker())
                sample = Sample(("worker", number), known.step)
                samples.append(sample)
            new = counts - self._stale.get(number, Counter())
            self._stale[number] = counts
            if new:
                sample.staleness = new
                sample.measured[STALE] = sum(age * n for age, n in new.items()) / new.total()
            self._tell_waits(sample, waited[number], elapsed_s)

    def _sample_job(self) -> Sample:
        """Sum up the workers that are there: all of their samples, the mean of what they report."""
        there = [worker for number, worker in self._workers.items() if number in self.alive]
        job = Sample(JOB, max((worker.step for worker in there), default=0))
        names = dict.fromkeys(name for worker in there for name in worker.reported)
        for name in names:
            values = [worker.reported[name] for worker in there if name in worker.reported]
            job.reported[name] = sum(values) / len(values)
        for tag in (SAMPLES_S, STEPS_S, WAIT, INPUT, COMPUTE):
            values = [worker.latest[tag] for worker in there if tag in worker.latest]
            if values:
                job.measured[tag] = sum(values) / (1 if tag == SAMPLES_S else len(values))
        job.measured[WORKERS] = len(self.alive)
        return job
