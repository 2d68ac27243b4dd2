"""Curves from the state of a run: one sample per second of each worker, each server, and the job.

Workers report every step; TensorBoard and Prometheus want a value now and then. Values are measured
between two samples where possible, so a curve shows the present and not the past. A `Sampler` keeps
the state (observe/telemetry/run_state.py) at the last sample. It writes no files.

Shares are of the time of a worker's steps. `waiting/for worker k` is a share too: servers count it;
without servers it follows from the times of the steps (observe/telemetry/step_times.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.observe.telemetry import staleness
from paceline.observe.telemetry.events import (
    CODEC_ERROR,
    COMM_SHARE,
    COMPUTE_SHARE,
    DONE_SHARE,
    STALENESS,
)
from paceline.observe.telemetry.run_state import Process, ProcessKey, RunState
from paceline.observe.telemetry.step_times import WorkerTimes
from paceline.runtime.process_names import ProcessName

JOB = ("job", 0)
STEPS_S, SAMPLES_S = "throughput/steps per s", "throughput/samples per s"
WAIT, INPUT, COMPUTE = "time/wait share", "time/input share", "time/compute share"
BYTES_S, BYTES_SENT = "traffic/bytes per s", "traffic/bytes sent"
CODEC, RATIO = "compression/codec error", "compression/ratio"
STALE = "staleness"
QUEUE, BUSY, REQUESTS_S = "server/queue", "server/busy", "server/requests per s"
WORKERS = "workers"
_MEASURED = {CODEC_ERROR: CODEC, STALENESS: STALE}  # values that workers report automatically
_MEASURED_ELSEWHERE = {COMPUTE_SHARE, COMM_SHARE, DONE_SHARE, *_MEASURED}


@dataclass
class Sample:
    """New values of one worker, server or job; the script chose the names in `reported`."""

    key: ProcessKey
    step: int
    measured: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)  # of updates since the last sample


@dataclass
class _Seen:
    """One worker at the last sample."""

    rank: int
    began: tuple[float, int, int]
    mark: tuple[float, int, int]  # time, step and bytes
    reports: int = 0
    times: WorkerTimes = field(default_factory=WorkerTimes)
    latest: dict[str, float] = field(default_factory=dict)  # newest measured values


class Sampler:
    """Takes samples of the run whose events are applied to `state`. Not thread-safe."""

    def __init__(self, process_names: Iterable[ProcessName]) -> None:
        self.state = RunState()
        for name in process_names:
            self.state.add_process(name.rank, name.role, name.number)
        self._seen: dict[int, _Seen] = {}  # by worker
        self._waited: dict[
            int, Mapping[int, float]
        ] = {}  # by worker and worker waited for, at the last sample
        self._stale: dict[int, Counter[int]] = {}  # by worker, at the last sample
        self._tables_seen = 0
        self._loads_seen: dict[int, int] = {}
        self._sampled_s = 0.0

    def sample(self, t: float) -> list[Sample]:
        """Return what is new since the last call."""
        workers = [one for one in self.state.workers() if one.reports]
        samples = [self._sample_worker(one) for one in workers if self._has_news(one)]
        if self._tables_seen != self.state.num_table_reports:
            self._tables_seen = self.state.num_table_reports
            self._add_tables(samples, t - self._sampled_s)
        if samples:
            samples.append(self._sample_job(workers))
        step = max((one.step or 0 for one in workers), default=0)
        samples += self._sample_servers(step)
        self._sampled_s = t
        return samples

    def _has_news(self, one: Process) -> bool:
        seen = self._seen.get(one.number)
        return seen is None or seen.rank != one.rank or seen.reports < one.reports

    def _seen_of(self, one: Process) -> _Seen:
        """Return a worker at the last sample; a replacement continues its predecessor's times."""
        seen = self._seen.get(one.number)
        if seen is None:
            seen = self._seen[one.number] = _Seen(one.rank, one.began, one.began)
        elif seen.rank != one.rank:
            seen.rank, seen.reports = one.rank, 0
        if seen.began != one.began:  # its script began to count from the start
            seen.began = seen.mark = one.began
        return seen

    def _sample_worker(self, one: Process) -> Sample:
        seen = self._seen_of(one)
        fresh = [name for name, report in one.reported_in.items() if report > seen.reports]
        sample = Sample(("worker", one.number), one.step or 0)
        sample.reported = {n: one.values[n] for n in fresh if n not in _MEASURED_ELSEWHERE}
        measured = sample.measured
        times = self.state.waits.workers.get(one.number)
        elapsed_s = one.last[0] - seen.mark[0]
        if times is not None and times.steps > seen.times.steps:
            since = times.since(seen.times)
            seen.times = replace(times)
            self._measure_steps(sample, since)
        elif times is None and elapsed_s > 0:
            measured[STEPS_S] = (one.last[1] - seen.mark[1]) / elapsed_s
        if elapsed_s > 0 and one.last[2] > seen.mark[2]:
            measured[BYTES_S] = (one.last[2] - seen.mark[2]) / elapsed_s
        if one.traffic is not None:
            measured[BYTES_SENT] = one.traffic.num_bytes
        if one.compression is not None and one.compression.sent_bytes:
            measured[RATIO] = one.compression.plain_bytes / one.compression.sent_bytes
        measured.update((tag, one.values[name]) for name, tag in _MEASURED.items() if name in fresh)
        seen.latest.update(measured)
        seen.mark, seen.reports = one.last, one.reports
        return sample

    def _measure_steps(self, sample: Sample, since: WorkerTimes) -> None:
        if since.took_s <= 0:
            return
        sample.measured[STEPS_S] = since.steps / since.took_s
        sample.measured[WAIT] = since.wait_s / since.took_s
        sample.measured[INPUT] = since.input_s / since.took_s
        sample.measured[COMPUTE] = since.compute_s / since.took_s
        if since.samples:
            sample.measured[SAMPLES_S] = since.samples / since.took_s
        if not self.state.tables:
            waited = self.state.waits.workers[sample.key[1]].waited_for_s
            self._measure_waits(sample, waited, since.took_s)

    def _measure_waits(self, sample: Sample, waited: Mapping[int, float], elapsed_s: float) -> None:
        """Add the shares of time that a worker waited for each other since the last sample."""
        before: Mapping[int, float] = self._waited.get(sample.key[1], {})
        for other, waited_s in waited.items():
            more_s = waited_s - before.get(other, 0.0)
            if more_s > 0 and elapsed_s > 0:
                sample.measured[f"waiting/for worker {other}"] = min(1.0, more_s / elapsed_s)
        self._waited[sample.key[1]] = dict(waited)

    def _add_tables(self, samples: list[Sample], elapsed_s: float) -> None:
        """Add what servers counted about each worker, over all tables."""
        ages: dict[int, Counter[int]] = {}
        tables = list(self.state.tables.values())
        waited = staleness.waited_for(tables)
        for one in (worker for report in staleness.merge(tables) for worker in report.workers):
            ages.setdefault(one.worker, Counter()).update(one.staleness)
        found = {sample.key[1]: sample for sample in samples}
        for number, counts in ages.items():
            sample = found.get(number)
            if sample is None:
                known = self.state.processes.get(("worker", number))
                sample = Sample(("worker", number), known.step or 0 if known else 0)
                samples.append(sample)
            new = counts - self._stale.get(number, Counter())
            self._stale[number] = counts
            if new:
                sample.staleness = new
                sample.measured[STALE] = sum(age * n for age, n in new.items()) / new.total()
            self._measure_waits(sample, waited[number], elapsed_s)

    def _sample_job(self, workers: Iterable[Process]) -> Sample:
        """Combine the running workers: the sum of their samples/s, the mean of other values."""
        alive = self.state.alive()
        there = [one for one in workers if one.number in alive]
        job = Sample(JOB, max((one.step or 0 for one in there), default=0))
        names = dict.fromkeys(name for one in there for name in one.values)
        for name in (name for name in names if name not in _MEASURED_ELSEWHERE):
            values = [one.values[name] for one in there if name in one.values]
            job.reported[name] = sum(values) / len(values)
        latest = [self._seen[one.number].latest for one in there if one.number in self._seen]
        for tag in (SAMPLES_S, STEPS_S, WAIT, INPUT, COMPUTE):
            values = [measured[tag] for measured in latest if tag in measured]
            if values:
                job.measured[tag] = sum(values) / (1 if tag == SAMPLES_S else len(values))
        job.measured[WORKERS] = len(alive)
        return job

    def _sample_servers(self, step: int) -> Iterable[Sample]:
        for server, load in self.state.loads.items():
            count = self.state.num_load_reports[server]
            if self._loads_seen.get(server) == count:
                continue
            self._loads_seen[server] = count
            measured = {BUSY: load.busy, REQUESTS_S: load.requests_s, QUEUE: float(load.queued)}
            yield Sample(("server", server), step, {**measured, BYTES_S: load.bytes_s})
