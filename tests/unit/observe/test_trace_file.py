"""Spans of several processes become a file that viewers draw, and a line that tells what it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.observe.record.trace_file import TraceFile, require_directory
from paceline.observe.telemetry.events import ProgressReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.trace import ASYNC, INSTANT, Spans, TracedSteps, TraceSpan
from paceline.runtime.process_names import ProcessName, process_names
from support.trace_checks import Trace


def _worker(rank: int, ready_s: float, offset_s: float = 0.0) -> Spans:
    """A step from 0 to 10 s of the job's clock; its bucket is ready at `ready_s`, all get it at 8;
    the clock of the process is behind by `offset_s`."""
    spans = [
        TraceSpan("input", "training", 1.0, 1.0, 20),
        TraceSpan("bucket 0 ready", "training", ready_s, 0.0, 20, INSTANT, {"bucket": 0}),
        TraceSpan("all_reduce bucket 0", "all_reduce", ready_s, 8.0 - ready_s, 20, ASYNC),
        TraceSpan("all_reduce bucket 1", "all_reduce", ready_s, 8.1 - ready_s, 20, ASYNC),
        TraceSpan("wait", "training", ready_s, 8.1 - ready_s, 20, args={"behind": "all_reduce"}),
        TraceSpan("wait", "training", 8.2, 1e-6, 20),
        TraceSpan("optimizer", "training", 8.5, 1.0, 20),
        TraceSpan("step 20", "training", 0.0, 10.0, 20),
    ]
    shifted = [TraceSpan(s.name, s.row, s.start_s - offset_s, s.took_s, s.step, s.kind, s.args)
               for s in spans]  # fmt: skip
    return Spans(rank, offset_s, tuple(shifted))


def _by_rank(*those: ProcessName) -> dict[int, ProcessName]:
    return {name.rank: name for name in those}


def test_all_are_on_one_clock_and_waits_name_the_last(tmp_path: Path) -> None:
    trace = TraceFile(TracedSteps(20, 21))
    trace.on_event(_worker(0, ready_s=4.0))
    trace.on_event(_worker(1, ready_s=7.5, offset_s=-1234.5))
    serving = TraceSpan("apply push worker 0", "serving", 7.0, 0.5, 20)
    trace.on_event(Spans(2, 0.0, (serving,)))
    line = trace.write(tmp_path / "run", _by_rank(*process_names(2, 1)))
    path = tmp_path / "run" / "trace.json"
    assert line == (
        f"trace of step 20, 2 ranks, 1 server: {path} (open in https://ui.perfetto.dev or"
        " chrome://tracing)"
    )
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"], "no draft is left"
    found = Trace(path)
    assert found.processes == {0: "rank 0", 1: "rank 1", 2: "server 0"}
    ends = {name: next(s["ts"] + s["dur"] for s in found.of(name) if s["name"] == "wait")
            for name in ("rank 0", "rank 1")}  # fmt: skip
    assert ends["rank 0"] == pytest.approx(ends["rank 1"], abs=0.01)
    waits = {n: [s["args"].get("for") for s in found.of(n) if s["name"] == "wait"] for n in ends}
    assert waits == {"rank 0": ["rank 1"], "rank 1": ["the transfer"]}, "and noise is left out"
    reduced = found.of("rank 0", "all_reduce")
    assert {s["tid"] for s in reduced} == {1, 2}, "they overlap, and get rows of their own"
    assert {s["args"]["last"] for s in reduced} == {"rank 1"}
    assert [mark["name"] for mark in found.marks] == ["bucket 0 ready"] * 2


def test_what_is_left_of_a_step_is_computing(tmp_path: Path) -> None:
    trace = TraceFile(TracedSteps(20, 21))
    trace.on_event(_worker(0, ready_s=4.0))
    trace.write(tmp_path, _by_rank(*process_names(1)))
    compute = [s for s in Trace(tmp_path / "trace.json").of("rank 0") if s["name"] == "compute"]
    ends = [at for s in compute for at in (s["ts"] / 1e6, (s["ts"] + s["dur"]) / 1e6)]
    assert ends == pytest.approx([0.0, 1.0, 2.0, 4.0, 8.1, 8.5, 9.5, 10.0])


def test_spans_that_do_not_nest_are_cut_so_that_viewers_draw_them(tmp_path: Path) -> None:
    trace = TraceFile(TracedSteps(1, 3))
    spans = (
        TraceSpan("step 1", "training", 0.0, 1.0, 1),
        TraceSpan("late", "training", 0.5, 1.0, 1),
        TraceSpan("step 2", "training", 1.0, 1.0, 2),
    )
    trace.on_event(Spans(0, 0.0, spans))
    trace.write(tmp_path, _by_rank(*process_names(1)))
    assert "late" in Trace(tmp_path / "trace.json").names("rank 0")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    trace = TraceFile(TracedSteps(20, 30))
    trace.on_event(_worker(0, ready_s=4.0))
    trace.on_event(Spans(0, 0.0, (), is_cut=True))
    trace.on_event(_worker(7, ready_s=5.0))
    newcomers = [ProcessName(7, 1, is_newcomer=True), ProcessName(8, 2, is_newcomer=True)]
    line = trace.write(tmp_path, _by_rank(*process_names(2), *newcomers))
    assert line.endswith("; nothing from rank 1; rank 0 stopped recording at 200000 spans")
    found = Trace(tmp_path / "trace.json")
    assert found.processes == {0: "rank 0", 7: "rank 1 (process 7)"}
    assert found.said["nothing from"] == "rank 1"


def test_a_job_that_ended_before_says_so_and_writes_nothing(tmp_path: Path) -> None:
    trace = TraceFile(TracedSteps(20, 30))
    here = _by_rank(*process_names(2))
    assert "no step was counted" in trace.write(tmp_path, here)
    trace.on_event(ProgressReport(0, 999, steps=(StepTimes(12, 0.0, 0.1, 0.0, 0.0),)))
    expected = "no trace of steps 20 to 29: training ended at step 12"
    assert trace.write(tmp_path, here) == expected
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_costs_a_line_only(tmp_path: Path) -> None:
    trace = TraceFile(TracedSteps(20, 21))
    trace.on_event(_worker(0, ready_s=4.0))
    (tmp_path / "file").write_text("")
    line = trace.write(tmp_path / "file", _by_rank(*process_names(1)))
    assert line.startswith("the trace could not be written to ")


def test_a_trace_without_a_directory_is_refused() -> None:
    require_directory(None, None)
    with pytest.raises(ConfigError, match="--trace 2:4 with --log-dir none"):
        require_directory(TracedSteps(2, 4), None)
