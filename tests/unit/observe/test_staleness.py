"""What people read about staleness and waiting: each step once, the worst server, 100 columns."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.observe.telemetry.staleness import (
    ALL_SERVERS,
    TableReport,
    WorkerReport,
    describe,
    merge,
    waited_for,
)


def test_a_worker_waits_for_all_tables_at_once() -> None:
    short = TableReport("a", 0, 1, (WorkerReport(0, 1, {}, {1: 1.0}), WorkerReport(2, 1)))
    long = TableReport("b", 0, 1, (WorkerReport(0, 1, {}, {1: 0.5, 2: 2.0}),))
    assert waited_for([short, long]) == waited_for([long, short]) == {0: {1: 0.5, 2: 2.0}, 2: {}}


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_an_update_on_two_servers_counts_once_where_it_was_stalest() -> None:
    fresh = WorkerReport(0, 4, {0: 3, 1: 1}, {1: 0.5, 2: 2.0}, dropped=2)
    stale = WorkerReport(0, 4, {1: 2, 2: 2}, {1: 1.0}, skipped=1, overwritten=6)
    other = WorkerReport(1, 3, {0: 3})
    merged = merge([TableReport("m", 0, 9, (fresh, other)), TableReport("m", 1, 8, (stale,))])
    both = WorkerReport(0, 4, {1: 2, 2: 2}, {1: 0.5, 2: 2.0}, 2, 1, 6)
    assert merged == [TableReport("m", ALL_SERVERS, 9, (both, other))]


def test_tables_stay_apart_and_the_newest_report_of_a_server_counts() -> None:
    early = TableReport("a", 0, 1, (WorkerReport(0, 1, {5: 1}),))
    late = TableReport("a", 0, 4, (WorkerReport(0, 4, {5: 1, 0: 3}),))
    key = TableReport("b", 0, 2, (WorkerReport(0, 2, {0: 2}),))
    assert merge([early, key, late]) == [late, key]


def test_the_lines_for_people() -> None:
    workers = (
        WorkerReport(0, 300, {0: 20, 1: 160, 2: 80, 3: 40}),
        WorkerReport(1, 300, {0: 300}, {0: 1.0, 2: 0.5, 3: 1211.0}),
        WorkerReport(3, 0, dropped=2, overwritten=7),
    )
    assert describe([TableReport("model", 0, 600, workers)]) == [
        "model: version 600; staleness in versions",
        "  worker  updates   mean    max  0..3                 waited  for worker",
        "       0      300    1.5      3  |.@=:|               0.00 s",
        "       1      300    0.0      0  |@   |               20 min  3 (20 min), 0 (1.00 s), ...",
        "       3        0    0.0      0  |    |               0.00 s",
        "  worker 3: dropped 2 (too old), overwrote 7 versions",
    ]


def test_wide_histograms_share_bins() -> None:
    report = TableReport("model", 0, 9, (WorkerReport(0, 4, {0: 1, 1: 1, 3: 1, 31: 1}),))
    line = describe([report])[2]
    assert "|@=" + " " * 13 + "=|" in line


def test_many_tables_are_cut_short_and_no_reports_are_no_lines() -> None:
    reports = [TableReport(f"key{k}", 0, 1, (WorkerReport(0, 1, {0: 1}),)) for k in range(11)]
    assert describe(reports)[-1] == "... and 3 more tables"
    assert describe([]) == describe([TableReport("model", 0, 0)]) == []


worker_reports = st.builds(
    WorkerReport,
    st.integers(0, 9999),
    st.integers(0, 9_999_999),
    st.dictionaries(st.integers(0, 99_999), st.integers(1, 9_999_999), max_size=30),
    st.dictionaries(st.integers(0, 9999), st.floats(0, 5e6), max_size=6),
    *(st.integers(0, 9_999_999) for _ in range(3)),
)
table_reports = st.builds(
    TableReport,
    st.sampled_from(["model", "a.very.long.name." * 9]),
    st.integers(0, 3),
    st.integers(0, 10**9),
    st.lists(worker_reports, max_size=4).map(tuple),
)


@patient
@given(st.lists(table_reports, max_size=6))
def test_lines_fit_whatever_was_counted(reports: list[TableReport]) -> None:
    lines = describe(reports)
    assert all(len(line) <= 100 and line == line.rstrip() for line in lines)
    assert len(lines) >= sum(1 + len(report.workers) for report in merge(reports) if report.workers)
