"""The closing summary: it fits on a screen, and names the slowest worker and its cause."""

from __future__ import annotations

import pytest

from paceline.observe.display.board import Board
from paceline.observe.display.summary import ClosingSummary, describe_bottleneck
from paceline.observe.telemetry.events import ProgressReport, TrainingConfigured
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.runtime.mesh import Mesh
from paceline.runtime.process_names import process_names


def _board(
    num_workers: int,
    slow: int | None,
    *,
    slow_input_s: float = 0.0,
    wait_s: float = 0.06,
    num_servers: int = 0,
) -> Board:
    """Lockstep: a step takes 100 ms, of which all but the slow one wait `wait_s`."""
    board = Board(process_names(num_workers, num_servers))
    for rank in range(num_workers):
        is_slow = rank == slow
        steps = tuple(
            StepTimes(
                number,
                number / 10,
                0.1,
                slow_input_s if is_slow else 0.001,
                0.001 if is_slow else wait_s,
                32,
            )
            for number in range(1, 101)
        )
        board.on_event(ProgressReport(rank, 100, {"loss": 0.03125}, 0.0, None, None, steps), 10.0)
        board.set_state(rank, "finished")
    return board


def test_a_slow_loader_is_named_with_its_cost() -> None:
    words = describe_bottleneck(_board(3, slow=2, slow_input_s=0.06).state)
    assert words is not None
    assert words.startswith(
        "slowest: worker 2, which takes 2.5 times as long per step as the others because of its"
        " input (data loading)"
    )
    assert "the other workers waited 60 % of the time for it; give it more loader workers" in words


def test_a_slow_computation_is_named_as_such() -> None:
    words = describe_bottleneck(_board(3, slow=1).state)
    assert (
        words is not None
        and "slowest: worker 1" in words
        and "because of its computation:" in words
    )
    assert "ssp:3" in words


@pytest.mark.parametrize(("has_servers", "where"), [(True, "with the servers"), (False, "itself")])
def test_a_slow_exchange_is_nobodys_fault(has_servers: bool, where: str) -> None:
    board = _board(4, slow=None, wait_s=0.04, num_servers=int(has_servers))
    words = describe_bottleneck(board.state)
    assert words is not None
    assert words.startswith(f"no worker is slow: 40 % of the time went into the exchange {where};")


@pytest.mark.parametrize(
    ("mesh", "place", "remedy"),
    [
        ("dp=2,pp=2", "worker 3 (pp 1), ", "leave out splits="),
        ("pp=2,tp=2", "worker 3 (pp 1, tp 1), ", "leave out splits="),
        ("dp=2,fsdp=2", "worker 3 (fsdp 1), ", "batches are larger"),
        ("tp=4", "worker 3 (tp 3), ", "else runs on its core"),
        ("dp=4", "worker 3, ", "ssp:3"),
    ],
)
def test_parts_of_a_model_have_a_place_and_remedies_of_their_own(
    mesh: str, place: str, remedy: str
) -> None:
    """No pace helps a unit whose parts wait for each other."""
    board = _board(4, slow=3)
    board.on_event(TrainingConfigured(0, {"mesh": mesh}), 0.0)
    assert board.state.mesh == Mesh.parse(mesh)
    words = describe_bottleneck(board.state)
    assert words is not None and words.startswith(f"slowest: {place}") and remedy in words
    assert ("--pace" in words) == (mesh == "dp=4")
    board = _board(4, slow=None, wait_s=0.04)
    board.on_event(TrainingConfigured(0, {"mesh": mesh}), 0.0)
    waiting = describe_bottleneck(board.state)
    assert waiting is not None
    assert ("--pace" in waiting) == (mesh == "dp=4")


@pytest.mark.parametrize("waited_s", [0.0, 3.0])
def test_servers_know_whether_a_worker_was_waited_for(waited_s: float) -> None:
    """At free-running paces a worker that takes longer costs the others nothing."""
    board = _board(3, slow=1, num_servers=1)
    workers = tuple(WorkerReport(w, 100, {1: 100}, {1: waited_s}) for w in (0, 2))
    board.on_event(TableReport("dense", 0, 300, workers), 10.0)
    words = describe_bottleneck(board.state)
    assert words is not None
    if waited_s:
        assert "slowest: worker 1" in words and "waited 30 % of the time for it" in words
        assert "async, or ssp with a larger bound" in words
    else:
        assert words.startswith("no worker is slow: 40 % of the time went into the exchange with")


def test_the_learning_rate_is_no_result() -> None:
    board = Board(process_names(1))
    board.on_event(ProgressReport(0, 3, {"lr": 0.1}), 0.0)
    assert ClosingSummary(command="t.py", board=board).lines(80, 24)[0] == "paceline: t.py: 3 steps"


def test_what_costs_little_is_not_worth_a_word() -> None:
    assert describe_bottleneck(_board(4, slow=2, wait_s=0.004).state) is None
    assert describe_bottleneck(_board(1, slow=None).state) is None


def _reports(num_workers: int) -> list[TableReport]:
    workers = tuple(WorkerReport(w, 100, {w: 100}, {0: 0.5}) for w in range(num_workers))
    return [TableReport("dense", 0, 800, workers)]


def test_eight_workers_fit_on_a_screen() -> None:
    board = _board(8, slow=3, slow_input_s=0.06, num_servers=1)
    for report in _reports(8):
        board.on_event(report, 10.0)
    told = ["8 workers sent 7.7 MB each (64.4 kB per step), 62 MB in all; waited 7 to 24 % of it"]
    closing = ClosingSummary(command="train.py --epochs 3", board=board, sentences=told)
    lines = closing.lines(80, 24)
    assert len(lines) <= 22, "there are still the end of the job and the prompt"
    assert all(len(line) <= 80 for line in lines), lines
    assert lines[0] == (
        "paceline: train.py --epochs 3: 100 steps, 10.0 steps/s, 2560 samples/s, loss"
    )
    assert lines[1] == "  0.03125"
    assert lines[2].split()[:3] == ["rank", "step", "samples/s"]
    assert "input %  compute %  wait %  stale" in lines[2]
    text = " ".join(line.strip() for line in lines)
    assert "dense: version 800; stalest: worker 7, 7.0 versions on average, at most 7" in text
    wide = closing.lines(160, None)
    assert "  worker  updates   mean    max  0..7" in "\n".join(wide), "there is room for all of it"
    assert len(wide) == 1 + 9 + 1 + 10 + 1, "and every sentence is a line"


def test_a_script_that_reports_nothing_gets_no_summary() -> None:
    closing = ClosingSummary(command="train.py", board=Board(process_names(2)))
    assert closing.lines(80, 24) == []


def test_odd_names_of_scripts_do_no_harm() -> None:
    board = _board(1, slow=None)
    name = "\x1b[2J\udce9" + "x" * 100
    (first, *_) = ClosingSummary(command=name, board=board).lines(160, None)
    assert first.startswith(r"paceline: \x1b[2J\xe9xx") and "xxx...: 100 steps" in first
