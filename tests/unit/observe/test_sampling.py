"""Curves from events: rates and shares between two samples, who waits for whom, staleness."""

from __future__ import annotations

import math

from paceline.observe.record import sampling as m
from paceline.observe.telemetry.events import MemberJoined, MemberLost, ProgressReport, ServerLoad
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.traffic import Compression, Traffic
from paceline.runtime.process_names import process_names


def by_who(samples: list[m.Sample]) -> dict[m.Who, m.Sample]:
    return {sample.key: sample for sample in samples}


def steps(count: int, wait_s: float, *, first: int = 1) -> tuple[StepTimes, ...]:
    return tuple(StepTimes(first + i, float(i), 1.0, 0.25, wait_s, 32) for i in range(count))


def test_rates_and_shares_are_those_since_the_last_sample():
    found = m.Sampler(process_names(2))
    for rank, wait_s in ((0, 0.5), (1, 0.0)):
        found.state.apply(
            1.0, ProgressReport(rank, 2, {"loss": 1.0 + rank}, steps=steps(2, wait_s))
        )
    first = by_who(found.sample(1.0))
    assert first["worker", 0].measured[m.WAIT] == 0.5
    assert first["worker", 0].measured[m.INPUT] == first["worker", 0].measured[m.COMPUTE] == 0.25
    assert first["worker", 0].measured[m.SAMPLES_S] == 32
    assert first["worker", 0].measured["waiting/for worker 1"] == 0.5
    assert "waiting/for worker 0" not in first["worker", 1].measured
    job = first[m.JOB]
    assert job.measured[m.SAMPLES_S] == 64 and job.measured[m.WORKERS] == 2
    assert job.reported == {"loss": 1.5} and job.step == 2

    found.state.apply(2.0, ProgressReport(0, 4, {}, steps=steps(2, 0.0, first=3)))
    second = by_who(found.sample(2.0))
    assert ("worker", 1) not in second, "it has told nothing new"
    assert second["worker", 0].measured[m.WAIT] == 0.0 and not second["worker", 0].reported
    assert found.sample(3.0) == []


def test_scripts_without_hooks_have_a_rate_too():
    found = m.Sampler(process_names(1))
    found.state.apply(1.0, ProgressReport(0, 10, {"loss": math.nan}))
    found.sample(1.0)
    found.state.apply(3.5, ProgressReport(0, 20, {}, age_s=0.5))
    sample = by_who(found.sample(4.0))["worker", 0]
    assert sample.measured == {m.STEPS_S: 5.0}
    found.state.apply(5.0, ProgressReport(0, 1))  # counts anew
    assert found.sample(5.0)[0].measured == {}


def test_traffic_and_compression():
    found = m.Sampler(process_names(1))
    codec = Compression("topk", 1, 1000.0, 10.0, 0.1)
    for t, sent in ((1.0, 1000), (2.0, 5000)):
        told = {"codec error": 0.25, "compute %": 80.0}
        found.state.apply(t, ProgressReport(0, int(t), told, 0.0, Traffic(1, sent, 0), codec))
    sample = by_who(found.sample(2.0))["worker", 0]
    assert sample.measured[m.BYTES_S] == 4000 and sample.measured[m.BYTES_SENT] == 5000
    assert sample.measured[m.RATIO] == 100 and sample.measured[m.CODEC] == 0.25
    assert sample.reported == {}


def test_servers_tell_staleness_and_for_whom_workers_waited():
    found = m.Sampler(process_names(2, 2))
    found.state.apply(1.0, ProgressReport(0, 5, steps=steps(5, 0.5)))
    found.state.apply(1.0, TableReport("a", 0, 9, (WorkerReport(0, 9, {0: 5, 2: 4}, {1: 2.0}),)))
    found.sample(10.0)
    found.state.apply(
        11.0, TableReport("a", 0, 12, (WorkerReport(0, 12, {0: 5, 2: 5, 3: 2}, {1: 3.0}),))
    )
    found.state.apply(11.0, ServerLoad(2, 0, 100.0, 1e6, 0.5, 7))
    second = by_who(found.sample(12.0))
    worker = second["worker", 0]
    assert worker.staleness == {2: 1, 3: 2} and worker.step == 5
    assert worker.measured == {m.STALE: 8 / 3, "waiting/for worker 1": 0.5}
    server = second["server", 0]
    assert (server.measured[m.BUSY], server.measured[m.QUEUE], server.step) == (0.5, 7, 5)


def test_those_who_come_and_go_keep_their_numbers():
    found = m.Sampler(process_names(2))
    found.state.apply(1.0, MemberLost("worker", 1, 1, "vm:1", "killed", 2))
    assert found.state.alive() == {0}
    found.state.apply(2.0, MemberJoined("worker", 1, 7, "vm:2", 3))
    found.state.apply(3.0, ProgressReport(7, 5, {"loss": 1.0}))
    assert found.state.alive() == {0, 1}
    assert ("worker", 1) in by_who(found.sample(3.0))
    found.state.apply(4.0, ProgressReport(99, 5, {"loss": 1.0}))  # nobody knows it
    assert found.sample(4.0) == []


def test_a_script_cannot_fill_the_memory_with_names():
    found = m.Sampler(process_names(1))
    for step in range(2000):
        found.state.apply(1.0, ProgressReport(0, step, {f"loss {step}": 1.0}))
    assert len(found.sample(1.0)[0].reported) == 200
