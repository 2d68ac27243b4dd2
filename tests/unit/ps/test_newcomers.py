"""Workers that come to a table, leave it for good, or leave a place that another one takes over."""

from __future__ import annotations

import pytest
import torch

from paceline.ps.spec import Rule
from support.tables import assign, commit, noise, parts, push, read, step, table, values

LOCKSTEP = Rule(bound=0, aggregate=True)
FREE = Rule(bound=None)
BOUNDED = Rule(bound=1)


def fresh(rule: Rule, workers=(0, 1), **options):
    made = table(rule, workers=workers, **options)
    assign(made, noise(1))
    return made


def finish(made, worker, clock):
    made.commit(worker, clock)


# -- lockstep -----------------------------------------------------------------------------------


def test_between_steps_a_worker_joins_at_once() -> None:
    made = fresh(LOCKSTEP)
    for worker in (0, 1):
        step(made, worker, noise(worker))
    assert made.join(2) == 1
    assert made.clocks.workers == (0, 1, 2)
    for worker in (0, 1, 2):
        step(made, worker, noise(worker))
    assert made.version == 2


def test_a_newcomer_takes_part_in_the_step_under_way() -> None:
    made = fresh(LOCKSTEP)
    push(made, 0, noise(0))
    assert made.join(2) == 0
    assert made.clocks.workers == (0, 1, 2)
    push(made, 1, noise(1))
    assert not made.is_reduced(0)
    push(made, 2, noise(2))
    mean = (noise(0) + noise(1) + noise(2)) / 3
    torch.testing.assert_close(made.shards[0].average, parts(made, mean)[0], rtol=0, atol=1e-6)
    for worker in (0, 1, 2):
        commit(made, worker)
    assert made.version == 1


def test_shards_that_are_averaged_already_go_without_the_newcomer() -> None:
    made = fresh(LOCKSTEP)
    for worker in (0, 1):
        made.push(worker, 0, 1, parts(made, noise(worker))[0])
    assert made.is_reduced(0) and not made.is_reduced(1)
    assert made.join(2) == 0
    for worker in (0, 1):
        made.push(worker, 1, 1, parts(made, noise(worker))[1])
    push(made, 2, noise(2))
    means = ((noise(0) + noise(1)) / 2, (noise(0) + noise(1) + noise(2)) / 3)
    for shard, mean in enumerate(means):
        there = made.shards[shard].average
        torch.testing.assert_close(there, parts(made, mean)[shard], rtol=0, atol=1e-6)
    for worker in (0, 1):
        commit(made, worker)
    assert made.version == 0  # the newcomer's commit is waited for
    commit(made, 2)
    assert made.version == 1


def test_a_newcomer_repeats_a_step_that_ended_on_this_server_only() -> None:
    made = fresh(LOCKSTEP)
    for worker in (0, 1):
        step(made, worker, noise(worker))
    before = values(made).clone()
    assert made.join(2) == 1
    for shard, grad in enumerate(parts(made, noise(2))):
        assert not made.push(2, shard, 1, grad)
    finish(made, 2, 1)
    assert torch.equal(values(made), before) and made.version == 1
    for worker in (0, 1, 2):
        step(made, worker, noise(worker))
    assert made.version == 2


def test_a_newcomer_that_is_gone_before_its_step_holds_up_nobody() -> None:
    made = fresh(LOCKSTEP)
    push(made, 0, noise(0))
    made.join(2)
    made.leave(2)
    push(made, 1, noise(1))
    commit(made, 0)
    commit(made, 1)
    assert made.clocks.workers == (0, 1)


def test_a_newcomer_goes_on_alone_when_all_others_are_gone() -> None:
    made = fresh(LOCKSTEP)
    for worker in (0, 1):
        step(made, worker, noise(worker))
    push(made, 0, noise(0))
    assert made.join(2) == 1
    made.leave(0)
    made.leave(1)
    assert made.clocks.workers == (2,)
    step(made, 2, noise(5))
    assert made.version == 2


def test_a_newcomer_uses_the_settings_that_the_others_have_now() -> None:
    settings = ({"lr": 0.5}, {"lr": 0.25})
    made, alone = fresh(LOCKSTEP), fresh(LOCKSTEP, workers=(1,))
    for worker in (0, 1):
        step(made, worker, noise(0), settings)
    step(alone, 1, noise(0), settings)
    made.leave(0)
    made.join(0)
    for worker in (0, 1):
        step(made, worker, noise(7))
    step(alone, 1, noise(7))
    assert torch.equal(values(made), values(alone))


# -- a place that is kept -----------------------------------------------------------------------


def reference() -> torch.Tensor:
    made = fresh(LOCKSTEP)
    for number in range(3):
        for worker in (0, 1):
            push(made, worker, noise(10 * number + worker))
        for worker in (0, 1):
            commit(made, worker)
    return values(made)


@pytest.mark.parametrize("pushed", ["nothing", "one shard", "all, alone", "all, averaged"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_replacement_repeats_the_step_and_the_result_is_the_same(pushed: str, lost: int) -> None:
    made, other = fresh(LOCKSTEP), 1 - lost

    def pushes(worker: int, number: int, shards=None) -> None:
        grads = parts(made, noise(10 * number + worker))
        for shard in range(len(grads)) if shards is None else shards:
            made.push(worker, shard, number + 1, grads[shard])

    for worker in (0, 1):
        pushes(worker, 0)
    for worker in (0, 1):
        commit(made, worker)
    if pushed == "all, averaged":
        pushes(other, 1)
    if pushed != "nothing":
        pushes(lost, 1, [0] if pushed == "one shard" else None)
    made.vacate(lost)
    if pushed != "all, averaged":
        pushes(other, 1)
        assert not made.is_reduced(0)
    else:
        assert made.is_reduced(0)
    assert made.join(lost) == 1
    pushes(lost, 1)
    assert made.is_reduced(0) and made.is_reduced(1)
    finish(made, other, 2)
    assert made.version == 1
    finish(made, lost, 2)
    for worker in (0, 1):
        pushes(worker, 2)
    for worker in (0, 1):
        commit(made, worker)
    assert torch.equal(values(made), reference())
    assert made.version == 3


@pytest.mark.parametrize("others_first", [True, False])
def test_a_commit_of_the_lost_worker_counts_once(others_first: bool) -> None:
    made = fresh(LOCKSTEP)
    for worker in (0, 1):
        push(made, worker, noise(worker))
    commit(made, 1)
    made.vacate(1)
    if others_first:  # the step ends with the commit of the one that is gone
        commit(made, 0)
        assert made.version == 1
    assert made.join(1) == (1 if others_first else 0)
    for shard, grad in enumerate(parts(made, noise(1))):
        assert made.push(1, shard, 1, grad) is not others_first
    if others_first:
        assert made.is_repeating(1)
        assert made.last_average(0) == ((), "")
    finish(made, 1, 1)
    if not others_first:
        commit(made, 0)
    assert made.version == 1
    assert made.may_read(1)
    assert made.outcome(1).version == 1
    for worker in (0, 1):
        step(made, worker, noise(2 + worker))
    assert made.version == 2
    assert not made.is_repeating(1)


def test_whoever_did_not_take_over_a_place_may_repeat_nothing() -> None:
    made = fresh(LOCKSTEP)
    for worker in (0, 1):
        step(made, worker, noise(worker))
    with pytest.raises(ValueError, match="next is 2"):
        push(made, 0, noise(0), clock=1)


def test_a_place_that_nobody_will_take_is_given_up() -> None:
    made = fresh(LOCKSTEP)
    push(made, 0, noise(0))
    made.vacate(1)
    assert not made.is_reduced(0)
    made.leave(1)
    assert made.is_reduced(0)


# -- free-running -------------------------------------------------------------------------------


def test_a_newcomer_begins_with_the_clock_of_the_slowest() -> None:
    made = fresh(BOUNDED)
    for worker in (0, 1, 0):
        step(made, worker, noise(worker))
    assert made.join(2) == 1
    assert made.may_read(0)


@pytest.mark.parametrize("keeps_place", [True, False])
@pytest.mark.parametrize("rule", [FREE, BOUNDED])
def test_a_replacement_goes_on_at_the_clock_of_the_lost_one(rule: Rule, keeps_place: bool) -> None:
    made = fresh(rule)
    for worker in (0, 1):
        for _ in range(2):
            step(made, worker, noise(worker))
            read(made, worker)
    push(made, 1, noise(5))  # never committed
    (made.vacate if keeps_place else made.leave)(1)
    assert made.join(1) == 2
    before = values(made).clone()
    push(made, 1, noise(6), clock=2)  # it may not know that this counted
    finish(made, 1, 2)
    assert torch.equal(values(made), before)
    assert made.version == 4
    push(made, 1, noise(6), clock=3)
    finish(made, 1, 3)
    assert made.version == 5
    assert not torch.equal(values(made), before)


def test_a_vacant_place_holds_the_others_at_the_bound() -> None:
    made = fresh(BOUNDED)
    made.vacate(1)
    step(made, 0, noise(0))
    assert made.may_read(0)
    step(made, 0, noise(0))
    assert not made.may_read(0)
    made.leave(1)
    assert made.may_read(0)
