"""What a process records of the steps that are traced, and when it sends it."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.errors import ConfigError
from paceline.observe.telemetry import trace
from paceline.observe.telemetry.trace import INSTANT, Spans, TracedSteps, Tracer


def test_steps_are_written_as_slices() -> None:
    steps = TracedSteps.parse("20:30")
    assert [n for n in range(100) if n in steps] == list(range(20, 30))
    assert (str(steps), steps.text) == ("20:30", "steps 20 to 29")
    assert TracedSteps.parse(" 7:8 ").text == "step 7"


@pytest.mark.parametrize(
    "text", ["", "20", "20-30", "20:", ":30", "30:20", "20:20", "0:5", "-1:5", "1:20000", "a:b",
             "1:2:3", "1e3:2e3", "\u0661:\u0669"]
)  # fmt: skip
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*write --trace FIRST:STOP, .* --trace 20:30"):
        TracedSteps.parse(text)


def _train(tracer: Tracer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        start_s = tracer.start()
        if start_s:
            tracer.mark("bucket 0 ready", start_s, bucket=0)
            tracer.add("wait", start_s, behind="all_reduce")
        tracer.step_done(step)


def test_only_the_wanted_steps_are_recorded_and_sent_behind_the_last() -> None:
    sent: list[Spans] = []
    tracer = Tracer()
    tracer.plan(TracedSteps(3, 5), 2, sent.append)
    _train(tracer, 1, 3)
    assert not sent and tracer.on and tracer.step == 4
    _train(tracer, 4, 9)
    assert len(sent) == 1 and sent[0].rank == 2 and not tracer.on
    names = [(span.name, span.step) for span in sent[0].spans]
    each = ["bucket 0 ready", "wait", "step"]
    assert [name.removesuffix(f" {step}") for name, step in names] == each * 2
    assert [step for _, step in names] == [3, 3, 3, 4, 4, 4]
    assert [span.kind for span in sent[0].spans].count(INSTANT) == 2
    step = sent[0].spans[-1]
    assert step.start_s <= time.monotonic() and step.took_s >= 0


def test_without_a_plan_nothing_is_recorded() -> None:
    tracer = Tracer()
    assert tracer.start() == 0.0 and not tracer.on
    tracer.begin(0)
    assert not tracer.on


def test_long_traces_are_sent_in_pieces_and_end_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_SPANS", 50)
    monkeypatch.setattr(trace, "CHUNK", 20)
    sent: list[Spans] = []
    tracer = Tracer()
    tracer.plan(TracedSteps(1, 1000), 0, sent.append)
    _train(tracer, 1, 100)
    tracer.flush()
    assert [len(one.spans) for one in sent] == [20, 20, 10]
    assert sent[-1].is_cut and not tracer.on


def test_what_is_not_complete_is_sent_at_the_end() -> None:
    sent: list[Spans] = []
    tracer = Tracer()
    tracer.plan(TracedSteps(1, 50), 0, sent.append)
    _train(tracer, 1, 2)
    assert not sent
    tracer.flush()
    assert [span.step for span in sent[0].spans if span.name.startswith("step")] == [1, 2]
    tracer.flush()
    assert len(sent) == 1


def test_other_threads_have_rows_of_their_own() -> None:
    sent: list[Spans] = []
    tracer = Tracer()
    tracer.plan(TracedSteps(1, 2), 0, sent.append)
    thread = threading.Thread(target=lambda: tracer.add("work", tracer.start()), name="helper")
    thread.start()
    thread.join()
    tracer.add("wait", tracer.start())
    tracer.flush()
    assert [span.row for span in sent[0].spans] == ["helper", "training"]
