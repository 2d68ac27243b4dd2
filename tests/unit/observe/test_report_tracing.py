"""One step out of trace.json: which one, who did what, and files that are no traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.observe.report.page import render
from paceline.observe.report.reading import read_run
from paceline.observe.report.trace_lanes import StepTimeline, read_trace, span_kind
from support.recorded import training, whole, write_record


def span(
    rank: int, name: str, begin_ms: float, took_ms: float, tid: int = 0, **args: object
) -> dict:
    return {"ph": "X", "name": name, "pid": rank, "tid": tid, "ts": 1000 * begin_ms,
            "dur": 1000 * took_ms, "args": args}  # fmt: skip


def trace() -> list[dict]:
    """Three steps of two ranks; the third takes longest, the second is the median."""
    events = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"worker {rank}"}}
        for rank in (0, 1)
    ]
    for step, (begin, took) in {20: (0, 10), 21: (10, 12), 22: (22, 30)}.items():
        for rank in (0, 1):
            events += [
                span(rank, f"step {step}", begin, took),
                span(rank, "compute", begin, took / 2),
                span(rank, "wait", begin + took / 2, took / 2, **{"for": "worker 1"}),
                span(rank, "all_reduce bucket 0", begin + 1, took - 2, tid=1),
            ]
    return events


def read(tmp_path: Path, content: object) -> StepTimeline | None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    return read_trace(path)


@pytest.mark.parametrize("is_object", [True, False])
def test_the_median_step_is_shown(tmp_path: Path, is_object: bool) -> None:
    picture = read(tmp_path, {"traceEvents": trace()} if is_object else trace())
    assert picture is not None
    assert picture.caption == "Step 21 of the trace (3 steps), which took 12 ms."
    assert picture.span_s == pytest.approx(0.012)
    first, second = picture.lanes
    assert (first.name, second.name) == ("worker 0", "worker 1")
    told = [(bar.kind, bar.name, bar.depth, round(1000 * bar.begin_s)) for bar in first.bars]
    assert told == [
        ("compute", "compute", 0, 0),
        ("wait", "wait for worker 1", 0, 6),
        ("exchange", "all_reduce bucket 0", 1, 1),
    ]


def test_bars_that_lie_in_others_get_rows_below(tmp_path: Path) -> None:
    events = [span(0, "step 1", 0, 10), span(0, "push", 0, 10), span(0, "encode", 2, 3)]
    picture = read(tmp_path, events)
    assert picture is not None and picture.lanes[0].depth == 2


def test_the_page_prefers_the_trace_to_the_times(tmp_path: Path) -> None:
    write_record(tmp_path, whole(training()))
    assert "Step 21 of the trace" not in render(read_run(tmp_path))
    (tmp_path / "trace.json").write_text(json.dumps(trace()))
    page = render(read_run(tmp_path))
    assert "Step 21 of the trace" in page and "worker 0: all_reduce bucket 0, 10 ms" in page


def test_a_trace_without_steps_has_no_picture(tmp_path: Path) -> None:
    assert read(tmp_path, {"traceEvents": [span(0, "compute", 0, 1)]}) is None
    with pytest.raises(ValueError, match="no traceEvents"):
        read(tmp_path, {"events": []})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
odd_events = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "M"]) | json_values,
        "name": st.sampled_from(["step 1", "step 2", "wait", "process_name"]) | json_values,
        "pid": st.integers(0, 2) | json_values,
        "tid": st.integers(0, 2) | json_values,
        "ts": st.floats(0, 1e6) | json_values,
        "dur": st.floats(0, 1e6) | json_values,
        "args": st.dictionaries(st.sampled_from(["name", "for"]), json_values) | json_values,
    },
)


@settings(max_examples=80, deadline=None)
@given(st.lists(odd_events | json_values, max_size=12))
def test_no_trace_makes_it_stumble(tmp_path_factory: pytest.TempPathFactory, told: list) -> None:
    path = tmp_path_factory.getbasetemp() / "odd-trace.json"
    path.write_text(json.dumps(told))
    try:
        picture = read_trace(path)
    except ValueError:
        return  # NaN is no JSON
    assert picture is None or picture.span_s > 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [("wait for rank 1", "wait"), ("input", "input"), ("all_reduce bucket 3", "exchange"),
     ("push", "exchange"), ("compute", "compute"), ("???", "other")],
)  # fmt: skip
def test_kinds(name: str, kind: str) -> None:
    assert span_kind(name) == kind
