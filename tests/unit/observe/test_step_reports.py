"""Every step is told with its times; gauges are read when a message leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from paceline.errors import ConfigError
from paceline.observe.telemetry import reporter as reporting
from paceline.observe.telemetry.events import ProgressReport
from paceline.observe.telemetry.reporter import MAX_STEPS, Reporter
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.trace import Stopwatch
from paceline.observe.telemetry.traffic import CodecStats
from paceline.runtime.config import times_steps


def told(sent: Sequence[ProgressReport]) -> list[StepTimes]:
    return [step for progress in sent for step in progress.steps]


def test_every_step_is_told_once_with_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "INTERVAL_S", 1e9)
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    reporter.waiting.seconds, reporter.input_s, reporter.samples = 5.0, 7.0, 9  # before training
    reporter.begin()
    reporter.step_done(took_s=1.0, waited_s=0.25)
    reporter.waiting.seconds += 0.125  # a pipeline
    reporter.input_s += 0.5
    reporter.samples += 32
    reporter.step_done(took_s=1.0, waited_s=0.25)
    reporter.input_s += 3.0  # in another thread, while this one waited and computed
    reporter.step_done(took_s=2.0, waited_s=1.5)
    reporter.step_done(took_s=1.0, waited_s=9.0)
    reporter.flush()
    parts = [(s.step, s.took_s, s.input_s, s.wait_s, s.samples) for s in told(sent)]
    assert parts == [
        (1, 1.0, 0.0, 0.25, 0),
        (2, 1.0, 0.5, 0.375, 32),
        (3, 2.0, 0.5, 1.5, 0),
        (4, 1.0, 0.0, 1.0, 0),
    ]
    assert told(sent)[-1].end_s <= time.monotonic()
    assert sent[0].values == {"compute %": 75.0, "comm %": 25.0}
    assert sent[-1].values == {"compute %": 100 * 0.125 / 4, "comm %": 100 * 2.875 / 4}
    assert reporter.waited_s == pytest.approx(5.0 + 0.125 + 0.25 + 0.25 + 1.5 + 1.0)


def test_a_step_takes_from_the_end_of_the_one_before() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    time.sleep(0.01)
    began_s = time.monotonic()
    reporter.begin()
    for _ in range(3):
        reporter.step_done()
    reporter.flush()
    first, second, third = told(sent)
    assert first.took_s <= first.end_s - began_s, "setting up is not part of it"
    assert third.took_s <= third.end_s - first.end_s + (first.end_s - began_s)
    assert began_s <= first.end_s <= second.end_s <= third.end_s <= time.monotonic()


def test_of_too_many_steps_the_newest_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "INTERVAL_S", 1e9)
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    for _ in range(MAX_STEPS + 12):
        reporter.step_done()
    reporter.flush()
    assert [step.step for step in sent[-1].steps] == list(range(13, MAX_STEPS + 13))


def test_gauges_are_read_with_each_message_until_the_script_reports_them() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    rates = iter([0.5, 0.25, 0.125])
    reporter.watch("lr", lambda: next(rates))
    reporter.watch("stale", lambda: None)
    reporter.step_done({"compute %": 80.0, "comm %": 20.0})
    assert sent[-1].values == {"compute %": 80.0, "comm %": 20.0, "lr": 0.5}
    reporter.report(None, {"loss": 1.0})
    reporter.flush()
    assert sent[-1].values == {"loss": 1.0, "lr": 0.25}
    reporter.report(None, {"lr": 7.0})
    reporter.flush()
    assert sent[-1].values == {"lr": 7.0}
    reporter.report(None, {"loss": 0.5})
    reporter.flush()
    assert sent[-1].values == {"loss": 0.5}, "the script's own is the last word"


def test_what_a_codec_leaves_out_is_a_gauge() -> None:
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append)
    account = CodecStats()
    reporter.compression.open("topk:0.01", [account])
    for shares in ([0.5, 0.75], [], [0.25]):
        for share in shares:
            account.add_error(share)
        reporter.report(None, {"loss": 1.0})
        reporter.flush()
    assert [progress.values.get("codec error") for progress in sent] == [0.625, None, 0.25]


def test_off_tells_no_times() -> None:
    assert times_steps({}) and times_steps({"PACELINE_TELEMETRY": "on"})
    assert not times_steps({"PACELINE_TELEMETRY": "off"})
    with pytest.raises(ConfigError, match="PACELINE_TELEMETRY='no': expected on or off"):
        times_steps({"PACELINE_TELEMETRY": "no"})
    sent: list[ProgressReport] = []
    reporter = Reporter(0, sent.append, times_steps=False)
    reporter.watch("lr", lambda: 0.5)
    reporter.step_done(took_s=1.0, waited_s=0.5)
    assert (sent[-1].step, sent[-1].steps) == (1, ())
    assert sent[-1].values == {"compute %": 50.0, "comm %": 50.0}
    assert sent[-1].traffic is not None and sent[-1].traffic.waited_s == 0.5


def test_a_stopwatch_counts_what_is_nested_once() -> None:
    watch = Stopwatch()
    start_s = time.perf_counter()
    with watch, watch:
        time.sleep(0.01)
    with pytest.raises(KeyError), watch:
        raise KeyError
    assert 0.01 <= watch.seconds <= time.perf_counter() - start_s
