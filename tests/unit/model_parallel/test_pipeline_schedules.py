"""Orders of work: every process does all of its part, and together they never wait in a circle."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.schedules import (
    Action,
    can_run,
    choose_microbatches,
    forward_order,
    schedule_actions,
    stage_ranks,
    stages_of_rank,
    stages_per_process,
)

SCHEDULES = ["gpipe", "1f1b", "interleaved:2", "interleaved:3", "zero-bubble"]
CASES = [
    (schedule, num_ranks, microbatches)
    for schedule in SCHEDULES
    for num_ranks in (2, 3, 4, 8)
    for microbatches in (1, 2, 3, 4, 8, 16)
    if can_run(schedule, num_ranks, microbatches)
]


def is_ready(action: Action, done: set[Action], last: int) -> bool:
    kind, stage, microbatch = action

    def has_back(index: int) -> bool:
        return bool({Action("B", index, microbatch), Action("I", index, microbatch)} & done)

    if kind == "F":
        return stage == 0 or Action("F", stage - 1, microbatch) in done
    if kind == "W":
        return Action("I", stage, microbatch) in done
    return Action("F", stage, microbatch) in done and (stage == last or has_back(stage + 1))


@pytest.mark.parametrize(("schedule", "num_ranks", "microbatches"), CASES)
def test_everything_is_done_once_and_in_an_order_that_ends(schedule, num_ranks, microbatches):
    left = [list(schedule_actions(schedule, r, num_ranks, microbatches)) for r in range(num_ranks)]
    for rank, order in enumerate(left):
        counts = Counter(order)
        assert set(counts.values()) == {1}
        for stage in stages_of_rank(schedule, rank, num_ranks):
            for m in range(microbatches):
                assert Action("F", stage, m) in counts
                halves = {Action("I", stage, m), Action("W", stage, m)} <= counts.keys()
                assert (Action("B", stage, m) in counts) != halves
        assert {a.stage for a in order} == set(stages_of_rank(schedule, rank, num_ranks))
    last, done = num_ranks * stages_per_process(schedule) - 1, set[Action]()
    while any(left):
        before = len(done)
        for order in left:
            while order and is_ready(order[0], done, last):
                done.add(order.pop(0))
        assert len(done) > before, f"all wait: {[order[:1] for order in left]}"


def test_1f1b_keeps_few_microbatches():
    for rank in range(4):
        kept = most = 0
        for action in schedule_actions("1f1b", rank, 4, 16):
            kept += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, kept)
        assert most == 4 - rank


def test_1f1b_gives_the_first_and_the_last_gradients_back_at_once():
    for rank in range(3):
        halves = [action for action in schedule_actions("1f1b", rank, 3, 8) if action.kind in "IW"]
        early = [0, 1, 6, 7] if rank > 0 else []
        assert halves == [Action(kind, rank, m) for m in early for kind in "IW"]


def test_places_of_stages():
    assert stage_ranks("1f1b", 3) == [0, 1, 2]
    assert stage_ranks("interleaved:2", 3) == [0, 1, 2, 0, 1, 2]
    assert stage_ranks("zero-bubble", 3) == [0, 1, 2, 2, 1, 0]
    assert stages_of_rank("zero-bubble", 0, 3) == [0, 5]
    assert stages_of_rank("interleaved", 1, 2) == [1, 3]


def test_forward_only_takes_each_stage_in_turn():
    found = [(a.stage, a.microbatch) for a in forward_order([0, 3], 2)]
    assert found == [(0, 0), (0, 1), (3, 0), (3, 1)]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "rows", "expected"),
    [
        ("1f1b", 2, 16, 8),
        ("1f1b", 2, 6, 6),
        ("1f1b", 4, 24, 12),
        ("1f1b", 2, 17, 1),
        ("1f1b", 2, 1, 1),
        ("interleaved:2", 2, 7, 1),  # 7 in rounds of 2: does not work out
        ("interleaved:2", 2, 8, 8),
    ],
)
def test_number_of_microbatches(schedule, num_ranks, rows, expected):
    assert choose_microbatches(schedule, num_ranks, rows) == expected


@pytest.mark.parametrize("schedule", ["", "2f2b", "interleaved:1", "interleaved:x", "gpipe:2"])
def test_unknown_schedules_are_refused(schedule):
    with pytest.raises(UsageError, match="choose one of 'gpipe', '1f1b'"):
        stages_per_process(schedule)


def test_interleaved_says_which_numbers_work():
    with pytest.raises(UsageError, match=r"9 microbatches .* 2 processes in 4 .*microbatches=8"):
        schedule_actions("interleaved:2", 0, 2, 9)


@pytest.mark.parametrize(("schedule", "num_ranks", "microbatches"), CASES)
def test_both_ends_of_a_link_take_microbatches_in_their_order(schedule, num_ranks, microbatches):
    """On a device what is sent first arrives first (stage_links.py)."""
    for rank in range(num_ranks):
        by_kind: dict[tuple[bool, int], list[int]] = {}
        for kind, stage, microbatch in schedule_actions(schedule, rank, num_ranks, microbatches):
            if kind != "W":
                by_kind.setdefault((kind == "F", stage), []).append(microbatch)
        assert all(order == sorted(order) for order in by_kind.values())
