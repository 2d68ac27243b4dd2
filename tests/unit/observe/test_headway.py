"""How much of its loops a script has behind it."""

from __future__ import annotations

import pytest

from paceline.observe.telemetry.events import DONE_SHARE, ProgressReport
from paceline.observe.telemetry.reporter import LoopProgress, Reporter


def test_outside_of_loops_nothing_is_said() -> None:
    loop_progress = LoopProgress()
    assert loop_progress.percent() is None
    loop_progress.begin_pass(10)
    loop_progress.take_batch()
    assert loop_progress.percent() is None, "a pass alone may be one of many"


def test_rounds_and_batches_count_from_outside_to_inside() -> None:
    loop_progress = LoopProgress()
    epochs = loop_progress.enter(4)
    loop_progress.begin(epochs, 1)
    assert loop_progress.percent() == pytest.approx(25.0)
    loop_progress.begin_pass(10)
    for _ in range(6):
        loop_progress.take_batch()
    assert loop_progress.percent() == pytest.approx(25.0 + 25.0 * 0.5), "the sixth is still in work"
    loop_progress.begin(epochs, 2)
    assert loop_progress.percent() == pytest.approx(50.0), "a round begins with no batch"
    steps = loop_progress.enter(100)
    loop_progress.begin(steps, 50)
    assert loop_progress.percent() == pytest.approx(62.5)
    loop_progress.leave(steps)
    loop_progress.leave(epochs)
    assert loop_progress.percent() is None


def test_passes_of_unknown_length_and_empty_loops_are_no_error() -> None:
    loop_progress = LoopProgress()
    loop_progress.enter(0)
    loop_progress.begin_pass(None)
    loop_progress.take_batch()
    assert loop_progress.percent() == 0.0


def test_it_is_told_with_the_progress() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    steps = reporter.loop_progress.enter(8)
    reporter.loop_progress.begin(steps, 2)
    reporter.step_done()
    assert sent[-1].values[DONE_SHARE] == pytest.approx(25.0)
