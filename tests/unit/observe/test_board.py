"""The board: rates, shares, staleness and the time left, from what ranks report."""

from __future__ import annotations

import pytest

from paceline.observe.display.board import Board
from paceline.observe.telemetry.events import ProgressReport
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.traffic import Traffic
from paceline.runtime.process_names import ProcessName, process_names


def test_the_board_measures_the_recent_rate() -> None:
    board = Board(process_names(2))
    for second in range(100):
        board.on_event(ProgressReport(0, second * (1 if second < 80 else 3), {"loss": 1.0}), second)
    rate = board.rows(99.0)[0].steps_per_s
    assert rate == pytest.approx(3.0, abs=0.1)
    assert board.rows(103.0)[0].steps_per_s < rate, "a stall shows"
    assert "1 of 2 ranks reporting" in board.line(99.0)


def test_the_board_ignores_strangers_and_caps_columns() -> None:
    board = Board(process_names(1))
    board.on_event(ProgressReport(7, 1, {}), 0.0)
    assert not board.has_progress
    values = {"lr": 0.1, "compute %": 90.0, **{f"value{i}": i for i in range(50)}, "comm %": 8.0}
    board.on_event(ProgressReport(0, 1, values), 0.0)
    assert board.columns == (*(f"value{i}" for i in range(4)), "lr")
    assert board.rows(0.0)[0].wait == 8.0, "not a value of the script's own"


def test_a_line_gives_the_span_of_the_shares() -> None:
    board = Board(process_names(2))
    board.on_event(ProgressReport(0, 7, {"compute %": 83.4, "comm %": 9.2}), 0.0)
    assert board.line(0.0) == "step 7, wait 9 %, 1 of 2 ranks reporting"
    board.on_event(ProgressReport(1, 9, {"compute %": 70.6, "comm %": 29.1, "loss": 0.25}), 0.0)
    assert board.line(0.0) == "steps 7 to 9, loss 0.25, wait 9 to 29 %"


def test_a_line_names_whom_the_others_wait_for() -> None:
    board = Board(process_names(3))
    for rank, share in enumerate((71.0, 4.0, 66.0)):
        board.on_event(ProgressReport(rank, 7, {"compute %": 100 - share, "comm %": share}), 0.0)
    assert board.line(0.0).endswith("wait 4 to 71 %, the other workers wait for worker 1")
    board.on_event(ProgressReport(2, 8, {"comm %": 10.0}), 0.0)
    assert board.straggler(0.0) is None, "two of three compute as long"


def test_the_rate_is_measured_from_step_to_step() -> None:
    board = Board(process_names(1))
    for step in range(11):
        board.on_event(ProgressReport(0, 10 * step), step * 0.1)
    board.on_event(ProgressReport(0, 110, {}, age_s=4.9), 6.0)  # after an evaluation of 4.9 s
    board.on_event(ProgressReport(0, 110, {"accuracy": 0.9}, age_s=5.9), 7.0)
    assert board.rows(7.0)[0].steps_per_s == pytest.approx(110 / 7.0), "while it runs"
    board.set_state(0, "finished")
    assert board.rows(60.0)[0].steps_per_s == pytest.approx(100.0)


def _timed(board: Board, rank: int, *, input_s: float, wait_s: float, samples: int = 8) -> None:
    """Report 20 s of steps that take 100 ms each, the first one much longer."""
    for second in range(20):
        steps = tuple(
            StepTimes(
                10 * second + k + 1,
                second + (k + 1) / 10,
                100.0 if second == k == 0 else 0.1,
                input_s,
                wait_s,
                samples,
            )
            for k in range(10)
        )
        traffic = Traffic(10 * second, (second + 1) * 3_000_000, 0)
        event = ProgressReport(rank, 10 * second + 10, {"loss": 0.5}, 0.0, traffic, None, steps)
        board.on_event(event, second + 1.0)


def test_timed_steps_give_samples_and_shares_of_the_last_seconds() -> None:
    board = Board(process_names(2))
    _timed(board, 0, input_s=0.02, wait_s=0.05)
    _timed(board, 1, input_s=0.08, wait_s=0.001)
    first, second = board.rows(20.0)
    assert first.samples_per_s == pytest.approx(80.0, rel=0.01)
    assert (first.input, first.wait) == (pytest.approx(20.0), pytest.approx(50.0))
    assert (second.input, second.wait) == (pytest.approx(80.0), pytest.approx(1.0))
    assert first.compute is None, "one of three shares would be too much on a screen"
    assert first.sent_per_s == pytest.approx(3e6, rel=0.01)
    assert board.rows(24.0)[0].samples_per_s < 60.0, "a stall shows"
    line = board.line(20.0)
    assert line.startswith("step 200, 10.0 steps/s, 160 samples/s, loss 0.5, input 20 to 80 %,")
    assert line.endswith("wait 1 to 50 %, the other workers wait for worker 1 (its input)")


def test_the_end_counts_all_steps_of_a_worker() -> None:
    board = Board(process_names(1))
    _timed(board, 0, input_s=0.02, wait_s=0.05)
    (row,) = board.final_rows(21.0)
    took_s = 100.0 + 199 * 0.1
    assert row.steps_per_s == pytest.approx(200 / took_s)
    assert row.samples_per_s == pytest.approx(1600 / took_s)
    assert row.input + row.compute + row.wait == pytest.approx(100.0)


def test_a_slow_computation_is_told_from_a_slow_loader() -> None:
    board = Board(process_names(3))
    for rank in range(3):
        _timed(board, rank, input_s=0.001, wait_s=0.002 if rank == 2 else 0.06)
    assert board.line(20.0).endswith("the other workers wait for worker 2 (its computation)")


def test_who_counts_no_samples_shows_none() -> None:
    board = Board(process_names(1))
    _timed(board, 0, input_s=0.0, wait_s=0.0, samples=0)
    assert board.rows(20.0)[0].samples_per_s is None
    assert "samples" not in board.line(20.0)


def test_steps_of_another_clock_count_when_they_are_heard_of() -> None:
    board = Board(process_names(1))
    for second in range(10):
        steps = (StepTimes(second + 1, 1e6 + second, 1.0, 0.0, 0.5, 4),)
        board.on_event(ProgressReport(0, second + 1, {}, 0.0, None, None, steps), float(second))
    assert board.rows(9.0)[0].samples_per_s == pytest.approx(4.0)


def test_servers_say_how_stale_updates_are() -> None:
    board = Board(process_names(2, 1))
    fresh = WorkerReport(0, 4, {0: 4})
    board.on_event(TableReport("dense", 0, 8, (fresh, WorkerReport(1, 4, {0: 4}))), 0.0)
    assert board.rows(0.0)[0].staleness is None, "nothing is stale: no column"
    board.on_event(TableReport("dense", 0, 9, (fresh, WorkerReport(1, 4, {2: 2, 4: 2}))), 0.0)
    assert [row.staleness for row in board.rows(0.0)] == [0.0, 3.0]


def test_without_reports_of_servers_workers_say_it_themselves() -> None:
    board = Board(process_names(1))
    board.on_event(ProgressReport(0, 1, {"stale": 2.0}), 0.0)
    assert board.rows(0.0)[0].staleness == 2.0 and board.columns == ()


def test_the_time_left_follows_the_later_half() -> None:
    board = Board(process_names(2))
    for second in range(41):
        done = 0.5 * second if second <= 20 else 10 + 2.0 * (second - 20)  # percent
        for rank in range(2):
            board.on_event(ProgressReport(rank, second, {"done %": done}), float(second))
    assert "50 % done, 25 s left" in board.line(40.0)
    assert board.columns == (), "it is no value of the script's"
    assert "50 % done, 15 s left" in board.line(50.0), "between two reports the time goes on"
    assert board.snapshot(40.0).remarks[0] == "50 % done, 25 s left"


def test_another_loop_has_a_time_of_its_own() -> None:
    board = Board(process_names(1))
    for second in range(21):
        board.on_event(ProgressReport(0, second, {"done %": 5.0 * second}), float(second))
    assert " left" not in board.line(20.0), "it is over"
    for second in range(21, 31):
        board.on_event(ProgressReport(0, second, {"done %": 1.0 * (second - 20)}), float(second))
    assert "10 % done, 1 min 30 s left" in board.line(30.0)


def test_a_replacement_begins_anew() -> None:
    board = Board(process_names(2))
    _timed(board, 1, input_s=0.02, wait_s=0.05)
    board.add(ProcessName(7, 1, is_newcomer=True))
    assert board.rows(20.0)[1].samples_per_s is None
    assert board.state.waits.workers[1].steps == 200, "its predecessor's steps were of this worker"
