"""How much of its loops a script has behind it."""

from __future__ import annotations

import pytest

from paceline.observe.telemetry.events import DONE_SHARE, Progress
from paceline.observe.telemetry.reporter import Headway, Reporter


def test_outside_of_loops_nothing_is_said() -> None:
    headway = Headway()
    assert headway.percent() is None
    headway.begin_pass(10)
    headway.take_batch()
    assert headway.percent() is None, "a pass alone may be one of many"


def test_rounds_and_batches_count_from_outside_to_inside() -> None:
    headway = Headway()
    epochs = headway.enter(4)
    headway.begin(epochs, 1)
    assert headway.percent() == pytest.approx(25.0)
    headway.begin_pass(10)
    for _ in range(6):
        headway.take_batch()
    assert headway.percent() == pytest.approx(25.0 + 25.0 * 0.5), "the sixth is still in work"
    headway.begin(epochs, 2)
    assert headway.percent() == pytest.approx(50.0), "a round begins with no batch"
    steps = headway.enter(100)
    headway.begin(steps, 50)
    assert headway.percent() == pytest.approx(62.5)
    headway.leave(steps)
    headway.leave(epochs)
    assert headway.percent() is None


def test_passes_of_unknown_length_and_empty_loops_are_no_error() -> None:
    headway = Headway()
    headway.enter(0)
    headway.begin_pass(None)
    headway.take_batch()
    assert headway.percent() == 0.0


def test_it_is_told_with_the_progress() -> None:
    sent: list[Progress] = []
    reporter = Reporter(0, sent.append)
    steps = reporter.headway.enter(8)
    reporter.headway.begin(steps, 2)
    reporter.step_done()
    assert sent[-1].values[DONE_SHARE] == pytest.approx(25.0)
