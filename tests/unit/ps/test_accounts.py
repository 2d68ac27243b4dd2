"""What a server counts: every update once, every second of waiting for somebody."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.ps.server.worker_statistics import WorkerStatistics

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_updates_are_counted_by_their_staleness() -> None:
    accounts = WorkerStatistics([0, 1])
    for staleness in (3, 0, 3):
        accounts.updated(1, staleness)
    accounts.dropped(1)
    accounts.dropped(1)
    accounts.skipped(0)
    accounts.overwritten(0, 3)
    accounts.overwritten(0, 2)
    accounts.updated(4, 1)  # came later
    assert accounts.report("model", 1, 7) == TableReport(
        "model",
        1,
        7,
        (
            WorkerReport(0, 0, skipped=1, overwritten=5),
            WorkerReport(1, 3, {0: 1, 3: 2}, dropped=2),
            WorkerReport(4, 1, {1: 1}),
        ),
    )


def test_a_report_travels() -> None:
    accounts = WorkerStatistics([0])
    accounts.updated(0, 2)
    accounts.began_waiting(0, [3], 1.0)
    accounts.stopped_waiting(0, 1.5)
    report = accounts.report("model", 0, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=TableReport) == report


def test_time_is_shared_among_those_who_are_waited_for_while_they_are() -> None:
    accounts = WorkerStatistics([0, 1, 2])
    accounts.began_waiting(0, [1, 2], 10.0)
    accounts.began_waiting(0, [2], 14.0)
    accounts.stopped_waiting(0, 15.0)
    accounts.stopped_waiting(0, 99.0)
    report = accounts.report("model", 0, 0)
    assert report.workers[0].waited_s == {1: 2.0, 2: 3.0}
    assert report.workers[1].waited_s == report.workers[2].waited_s == {}


def test_waiting_for_nobody_is_not_waiting() -> None:
    accounts = WorkerStatistics([0])
    accounts.began_waiting(0, [1], 1.0)
    accounts.began_waiting(0, (), 3.0)
    accounts.stopped_waiting(0, 9.0)
    assert accounts.report("model", 0, 0).workers[0].waited_s == {1: 2.0}


waits = st.lists(st.tuples(st.sets(st.integers(1, 5)), st.floats(0, 100)), max_size=20)


@patient
@given(waits)
def test_shares_add_up_to_the_time_that_was_waited(waits: list[tuple[set[int], float]]) -> None:
    accounts, now_s, waited_s = WorkerStatistics(), 0.0, 0.0
    for blockers, lasts_s in waits:
        accounts.began_waiting(0, blockers, now_s)
        now_s += lasts_s
        waited_s += lasts_s if blockers else 0.0
    accounts.stopped_waiting(0, now_s)
    told = [sum(report.waited_s.values()) for report in accounts.report("model", 0, 0).workers]
    assert sum(told) == pytest.approx(waited_s)
