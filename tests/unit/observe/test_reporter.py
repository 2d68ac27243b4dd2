"""What a rank sends about itself: merged values, one number per step, a limited rate."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.observe.telemetry import reporter as reporting
from paceline.observe.telemetry.events import ProgressReport
from paceline.observe.telemetry.reporter import INTERVAL_S, Reporter

SHARES = {"compute %": 80.0, "comm %": 15.0}


@pytest.fixture
def _held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves by itself behind the first message, however long a test takes."""
    monkeypatch.setattr(reporting, "INTERVAL_S", 1e9)


@pytest.mark.usefixtures("_held")
def test_values_of_the_script_and_of_the_steps_are_merged() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(3, sent.append)
    reporter.step_done(SHARES)
    assert (sent[0].rank, sent[0].step, sent[0].values) == (3, 1, SHARES), "the first at once"
    reporter.step_done(SHARES)
    reporter.report(None, {"loss": 2.0, "lr": 0.1})
    reporter.step_done({"compute %": 70.0, "comm %": 25.0})
    reporter.report(None, {"loss": 1.0})
    reporter.step_done({"compute %": 60.0, "comm %": 35.0})
    reporter.flush()
    newest = {"compute %": 60.0, "comm %": 35.0, "loss": 1.0, "lr": 0.1}
    assert (sent[-1].step, sent[-1].values) == (4, newest)
    assert reporter.steps_done == 4


@pytest.mark.usefixtures("_held")
def test_the_scripts_own_step_numbers_win() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    reporter.step_done(SHARES)
    reporter.report(100, {"loss": 1.0})
    reporter.step_done(SHARES)
    reporter.flush()
    assert (sent[-1].step, sent[-1].values) == (100, {"loss": 1.0, **SHARES})
    reporter.report(None, {"loss": 0.5})
    reporter.flush()
    assert (sent[-1].step, sent[-1].values) == (100, {"loss": 0.5})
    assert reporter.steps_done == 2


def test_a_late_report_says_how_old_its_step_is() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    reporter.step_done(SHARES)
    reporter.step_done(SHARES)
    time.sleep(1.5 * INTERVAL_S)  # an evaluation
    reporter.report(None, {"accuracy": 0.9})
    assert (sent[-1].step, sent[-1].values["accuracy"]) == (2, 0.9)
    assert sent[-1].age_s >= 1.5 * INTERVAL_S
    reporter.step_done(SHARES)
    reporter.flush()
    assert sent[-1].age_s < sent[-2].age_s


def test_many_steps_are_few_messages() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    started_s = time.monotonic()
    for _ in range(10_000):
        reporter.step_done(SHARES)
    took_s = time.monotonic() - started_s
    assert len(sent) <= 1 + took_s / INTERVAL_S
    reporter.flush()
    assert sent[-1].step == 10_000
    count = len(sent)
    reporter.flush()
    assert len(sent) == count, "nothing new, nothing sent"


def test_the_documentation_says_how_often_messages_leave() -> None:
    words = {0.2: "at most five reports a second"}[INTERVAL_S]
    guide = Path(__file__).parents[3] / "docs/guides/monitoring.md"
    source = Path(reporting.__file__).parents[2] / "runtime/job.py"
    for path in (guide, source):
        assert words in " ".join(path.read_text().lower().split()), path
