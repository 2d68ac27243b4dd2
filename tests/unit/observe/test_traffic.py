"""What a job says about the bytes that its workers sent, and about their waits."""

from __future__ import annotations

import pytest

from paceline.observe.telemetry.events import ProgressReport
from paceline.observe.telemetry.reporter import Reporter
from paceline.observe.telemetry.traffic import Traffic, describe_traffic
from paceline.runtime.formatting import data_size


def test_the_first_step_does_not_count_for_what_a_step_costs() -> None:
    counts = iter([(900, 0), (1000, 10), (1200, 20)])
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append, lambda: next(counts))
    reporter.step_done({}, took_s=1.0, waited_s=0.25)
    assert sent[0].traffic == Traffic(1, 900, 0, None, 1.0, 0.25)
    reporter.step_done({}, took_s=1.0, waited_s=0.5)
    reporter.step_done({}, took_s=2.0, waited_s=9.0)
    reporter.flush()
    assert sent[-1].traffic == Traffic(3, 1200, 20, (1220 - 900) / 2, 4.0, 2.75)


def test_a_script_that_only_reports_has_no_traffic() -> None:
    sent: list[ProgressReport] = []
    Reporter(0, sent.append, lambda: (5, 5)).report(1, {"loss": 1.0})
    assert sent[0].traffic is None


def test_workers_that_sent_alike_are_one_number() -> None:
    one = Traffic(100, 1_200_000_000, 0, 12e6, 10.0, 1.4)
    assert describe_traffic([one] * 4) == [
        "4 workers sent 1.2 GB each (12 MB per step), 4.8 GB in all; waited 14 % of the time"
    ]


def test_differences_and_the_network_are_told() -> None:
    workers = [Traffic(9, 400, 2_000_000, 900_000.0, 1.0, 0.1), Traffic(9, 0, 400, 3e6, 1.0, 0.5)]
    assert describe_traffic(workers) == [
        "2 workers sent 400 B to 2 MB each (900 kB to 3 MB per step), 2 MB in all, 2 MB of it over"
        " the network; waited 10 to 50 % of the time"
    ]
    only = describe_traffic([Traffic(1, 0, 5000)])
    assert only == ["1 worker sent 5 kB, over the network"]


def test_nothing_is_said_when_nothing_was_sent() -> None:
    assert describe_traffic([]) == describe_traffic([Traffic(10, 0, 0, 0.0, 1.0, 0.0)]) == []


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (64_400, "64.4 kB")],
)
def test_amounts_are_decimal(count: int, words: str) -> None:
    assert data_size(count) == words
