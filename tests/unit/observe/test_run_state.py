"""One fold of the events: who is who, what is summed up, and what its readers have in common."""

from __future__ import annotations

import pytest

from paceline.observe.display.board import Board
from paceline.observe.record.sampling import JOB, SAMPLES_S, Sampler
from paceline.observe.report.reading import Run
from paceline.observe.telemetry.events import (
    MemberJoined,
    MemberLeft,
    MemberLost,
    ProgressReport,
    RunStarted,
    ServerLoad,
    TrainingConfigured,
)
from paceline.observe.telemetry.file_formats import EventLine
from paceline.observe.telemetry.run_state import RunState
from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.traffic import Traffic
from paceline.runtime.process_names import process_names

STARTED = RunStarted("run", "2026-11-17T07:12:04Z", "paceline run", "train.py", 2, servers=1)


def begun(workers: int = 2) -> RunState:
    state = RunState()
    state.apply(0.0, RunStarted("run", "", "", "train.py", workers, servers=1))
    return state


def step(rank: int, number: int, *, wait_s: float = 0.0, took_s: float = 1.0) -> ProgressReport:
    times = StepTimes(number, float(number), took_s, 0.0, wait_s, 4)
    return ProgressReport(rank, number, {"loss": 1.0 + rank}, steps=(times,))


def test_the_first_line_of_a_record_names_the_processes():
    state = begun()
    assert [one.label for one in state.in_order()] == ["0", "1", "s0"]
    assert state.alive() == {0, 1} and not state.has_progress


def test_a_stranger_counts_only_where_the_first_line_may_be_lost():
    for accepts_unknown in (False, True):
        state = RunState(accepts_unknown=accepts_unknown)
        state.apply(1.0, step(3, 1))
        assert set(state.waits.workers) == ({3} if accepts_unknown else set())


def test_what_a_server_reports_is_no_workers_step():
    state = begun()
    state.apply(1.0, step(2, 5))  # rank 2 is server 0
    assert state.steps == 0 and not state.waits.workers
    assert state.processes["server", 0].step == 5


def test_a_replacement_has_the_number_and_begins_anew():
    state = begun()
    state.apply(1.0, step(1, 5))
    state.apply(2.0, MemberLost("worker", 1, 1, "vm:1", "killed", 2))
    assert state.alive() == {0}
    state.apply(3.0, MemberJoined("worker", 1, 7, "vm:2", 3))
    assert state.alive() == {0, 1} and state.processes["worker", 1].step is None
    state.apply(4.0, step(7, 6))
    assert state.waits.workers[1].steps == 2, "of this worker, whichever process it was"
    state.apply(4.0, step(1, 99))  # a late word of the dead
    assert state.processes["worker", 1].step == 6


def test_who_has_left_took_part_in_its_last_steps_and_in_no_others():
    state = begun(3)
    for number in (1, 2):
        state.apply(1.0, step(0, number, wait_s=0.0))
    state.apply(2.0, MemberLeft("worker", 0, 0, "vm:1", 2))
    for number in (1, 2, 3):
        state.apply(3.0, step(1, number, wait_s=0.5))
        state.apply(3.0, step(2, number, wait_s=0.25))
    waited = state.waits.workers[1].waited_for_s
    assert waited == {0: 1.0, 2: 0.5}, "in step 3 there were two, and nobody waited for the third"


def test_who_is_lost_is_not_waited_for():
    state = begun(3)
    state.apply(2.0, MemberLost("worker", 2, 2, "vm:1", "killed", 2))
    state.apply(3.0, step(0, 1, wait_s=0.5))
    state.apply(3.0, step(1, 1))
    assert state.waits.workers[0].waited_for_s == {1: 0.5}


def test_the_newest_of_everything_is_kept():
    state = begun()
    for sent in (100, 300):
        state.apply(1.0, ProgressReport(0, sent, {"loss": float(sent)}, 0.0, Traffic(1, sent, 0)))
        state.apply(1.0, TableReport("dense", 0, sent))
        state.apply(1.0, ServerLoad(2, 0, float(sent), 0.0, 0.5))
    assert state.traffic[0].num_bytes == 300 and state.processes["worker", 0].values == {
        "loss": 300.0
    }
    assert state.tables["dense", 0].version == 300 and state.loads[0].requests_s == 300
    state.apply(1.0, TrainingConfigured(0, {"mesh": "dp=2"}))
    state.apply(1.0, TrainingConfigured(0, {"mesh": "of a newer version"}))
    assert str(state.mesh) == "dp=2"


def test_all_readers_say_the_same():
    """Display, curves and page differ in what they show of a run, not in what they count."""
    board, sampler, run = Board(process_names(2, 1)), Sampler(process_names(2, 1)), Run(None)  # type: ignore[arg-type]
    run.add(EventLine(0.0, STARTED))
    events = [
        *((0.5 * n, step(rank, n, wait_s=0.4 - 0.3 * rank)) for n in (1, 2) for rank in (0, 1)),
        (1.5, step(2, 50)),  # the server
        (2.0, MemberLost("worker", 1, 1, "vm:1", "killed", 2)),
        (2.5, MemberJoined("worker", 1, 5, "vm:2", 3)),
        *((3.0, step(rank, 3, wait_s=0.5)) for rank in (0, 5)),
    ]
    for t, event in events:
        board.on_event(event, t)
        sampler.state.apply(t, event)
        run.add(EventLine(t, event))
    states = [board.state, sampler.state, run.state]
    for state in states:
        assert state.steps == 6 and state.samples == 24 and state.alive() == {0, 1}
        assert {w: times.waited_for_s for w, times in state.waits.workers.items()} == {
            0: {1: pytest.approx(0.8)},
            1: {0: pytest.approx(0.5)},
        }
    rows = board.final_rows(3.0)
    job = next(sample for sample in sampler.sample(3.0) if sample.key == JOB)
    assert sum(row.samples_per_s for row in rows[:2]) == job.measured[SAMPLES_S] == 8.0
    assert sorted(run.history.values["loss"].last) == [0, 1], "no line for the server"
