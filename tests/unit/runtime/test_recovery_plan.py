"""Who gives, who receives, and what all know, after a loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.messages import Loss
from paceline.errors import ProtocolError
from paceline.runtime.elastic.recovery_plan import WorkerStatus, plan_recovery

LOSS = Loss(3, 3, "worker", "here:3", "killed by signal 9")


def worker(rank, passed, *, adopted=1, lost=(), is_new=False):
    return WorkerStatus(rank, passed, adopted, (0, 1, 2, 3), lost, is_new)


def test_equal_positions_move_nothing():
    verdict = plan_recovery([worker(0, 7, lost=(LOSS,)), worker(1, 7), worker(2, 7)])
    assert verdict.receivers == ()
    assert verdict.lost == (LOSS,)  # also where only one has heard of it
    assert verdict.before == (0, 1, 2, 3)


def test_whoever_is_one_behind_receives_from_one_who_is_not():
    verdict = plan_recovery([worker(0, 7), worker(1, 8), worker(2, 8)])
    assert (verdict.source, verdict.behind, verdict.passed) == (1, (0,), 8)


def test_workers_that_meet_in_a_step_that_each_can_finish_have_passed_it():
    inside = [WorkerStatus(rank, 7, 1, (0, 1, 2, 3), settles=True) for rank in (1, 2)]
    assert plan_recovery(inside).passed == 8
    late = plan_recovery([worker(0, 6), *inside])
    assert (late.source, late.behind, late.passed) == (1, (0,), 8)
    ahead = plan_recovery([*inside, worker(3, 8)])  # which has passed it without them
    assert (ahead.source, ahead.behind, ahead.passed) == (3, (1, 2), 8)


def test_a_newcomer_never_gives():
    verdict = plan_recovery([worker(5, 0, is_new=True), worker(1, 8), worker(2, 8)])
    assert (verdict.source, verdict.receivers) == (1, (5,))


def test_who_missed_a_change_receives_from_one_who_went_through_it():
    """Two were lost one after the other; only rank 2 had adopted the change between."""
    verdict = plan_recovery([worker(0, 8), worker(1, 8), worker(2, 8, adopted=2)])
    assert (verdict.source, verdict.outdated, verdict.behind) == (2, (0, 1), ())


def test_workers_that_are_far_apart_have_taken_different_paths():
    with pytest.raises(ProtocolError, match="more than one retryable step apart"):
        plan_recovery([worker(0, 5), worker(1, 8)])


def test_newcomers_alone_have_no_state():
    with pytest.raises(ProtocolError, match="newcomers"):
        plan_recovery([worker(4, 0, is_new=True)])


@given(st.lists(st.tuples(st.sampled_from([4, 5]), st.booleans()), min_size=1, max_size=6))
def test_everybody_who_lacks_something_receives_it(positions):
    statuses = [worker(r, passed, is_new=new) for r, (passed, new) in enumerate(positions)]
    if all(new for _, new in positions):
        return
    verdict = plan_recovery(statuses)
    for status in statuses:
        lacks = status.is_new or status.passed < verdict.passed
        assert (status.rank in verdict.receivers) is lacks
    assert verdict.source not in verdict.receivers
