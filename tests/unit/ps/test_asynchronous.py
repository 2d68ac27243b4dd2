"""Asynchronous tables: every update is applied as it arrives, and what is done about its age."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.ps.server.table import Table
from paceline.ps.spec import Rule
from support import tables as t

ASYNC = Rule(bound=None)
_RATES = ({"lr": 0.1}, {"lr": 0.02})


def make(rule: Rule = ASYNC, optimizer="SGD", groups=_RATES, **options) -> Table:
    table = t.table(rule, optimizer, groups, **options)
    t.assign(table, t.noise(1))
    for worker in table.spec.workers:
        if table.may_read(worker):
            t.read(table, worker)
    return table


@pytest.mark.parametrize("ranges", [t.WHOLE, t.CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_one_worker_is_plain_training_to_the_bit(optimizer, ranges):
    table = make(ASYNC, optimizer, workers=(3,), ranges=ranges)
    alone = t.OneProcess(t.noise(1), optimizer, _RATES)
    for number in range(6):
        rates = ({"lr": 0.3 / (number + 1)}, {"lr": 0.02}) if number != 3 else None
        t.step(table, 3, t.noise(10 + number), rates)
        alone.step(t.noise(10 + number), settings=rates)
        assert torch.equal(t.read(table, 3), alone.flat)
    assert table.outcome(3).staleness == 0


def test_updates_are_applied_one_by_one_in_the_order_of_commits():
    table = make(optimizer="Adam")
    alone = t.OneProcess(t.noise(1), "Adam", _RATES)
    t.push(table, 0, t.noise(2))
    t.step(table, 1, t.noise(3))
    assert table.version == 1 and table.may_read(1)
    t.commit(table, 0)
    alone.step(t.noise(3))
    alone.step(t.noise(2))
    assert torch.equal(t.values(table), alone.flat)
    assert [table.outcome(worker).staleness for worker in (0, 1)] == [1, 0]
    assert table.outcome(0).version == 2


def test_a_workers_settings_are_for_its_own_updates():
    table = make()
    alone = t.OneProcess(t.noise(1), "SGD", _RATES)
    slow, fast = ({"lr": 0.01}, {"lr": 0.01}), ({"lr": 1.0}, {"lr": 1.0})
    for worker, said, applied in (
        (0, slow, slow),
        (1, fast, fast),
        (0, None, slow),
        (1, None, fast),
    ):
        t.step(table, worker, t.noise(worker), said)
        alone.step(t.noise(worker), settings=applied)
    assert torch.equal(t.values(table), alone.flat)


def test_a_pushed_tensor_is_not_copied():
    table = make()
    grad = t.noise(2)
    t.push(table, 0, grad)
    grad *= 0.5  # clipped where it lies
    t.commit(table, 0)
    alone = t.OneProcess(t.noise(1), "SGD", _RATES)
    alone.step(0.5 * t.noise(2))
    assert torch.equal(t.values(table), alone.flat)


def test_pushes_that_are_repeated_or_given_up_do_not_count():
    table = make()
    t.push(table, 0, t.noise(2))
    t.push(table, 0, t.noise(3))
    t.push(table, 1, t.noise(4))
    t.commit(table, 0)
    table.discard(1)
    t.commit(table, 1)
    alone = t.OneProcess(t.noise(1), "SGD", _RATES)
    alone.step(t.noise(3))
    assert torch.equal(t.values(table), alone.flat)


def test_the_half_of_a_worker_that_left_does_not_count():
    table = make(Rule(bound=0))
    t.step(table, 0, t.noise(2))
    assert not table.may_read(0)
    t.push(table, 1, t.noise(3))
    table.leave(1)
    assert table.may_read(0) and table.version == 1


def test_parameters_without_a_gradient_are_left_alone():
    table = make(optimizer="AdamW")
    t.push(table, 0, t.noise(2), absent=(0, 3))
    t.commit(table, 0)
    alone = t.OneProcess(t.noise(1), "AdamW", _RATES)
    alone.step(t.noise(2), absent=(0, 3))
    assert torch.equal(t.values(table), alone.flat)


def test_a_clock_bound_makes_the_fast_wait_and_counts_it():
    clock = t.Clock()
    table = make(Rule(bound=1), now=clock)
    t.step(table, 0, t.noise(2))
    t.read(table, 0)
    t.step(table, 0, t.noise(3))
    assert not table.may_read(0) and table.describe_wait([0]) == "worker 1 (table 'model')"
    clock.now_s += 3.0
    t.step(table, 1, t.noise(4))
    assert table.may_read(0) and table.outcome(1).staleness == 2
    clock.now_s += 5.0
    t.read(table, 0)
    reports = table.report().workers
    assert reports[0].waited_s == {1: 3.0} and reports[1].waited_s == {}
    assert reports[0].staleness == {0: 2} and reports[1].staleness == {2: 1}


def test_whoever_reads_early_gets_values_but_still_waits():
    table = make(Rule(bound=0))
    t.step(table, 0, t.noise(2))
    assert torch.equal(t.read(table, 0), t.values(table))  # a pull, whatever the clocks say
    assert table.has_committed(0) and not table.may_read(0)


def test_a_bound_in_versions_needs_a_read_before_each_update():
    table = make(Rule(bound=0, unit="version"))
    t.step(table, 0, t.noise(2))
    assert not table.outcome(0).error
    before = t.values(table)
    t.step(table, 1, t.noise(3))  # it was not let in
    assert "worker" in table.outcome(1).text and table.outcome(1).error == "UsageError"
    assert torch.equal(t.values(table), before)


def test_too_old_updates_are_dropped_whole():
    table = make(Rule(bound=None, max_staleness=1))
    t.step(table, 0, t.noise(2))
    t.step(table, 0, t.noise(3))
    before = t.values(table)
    t.step(table, 1, t.noise(4))
    assert table.outcome(1).notice == "dropped: 2 versions old, max_staleness=1"
    assert torch.equal(t.values(table), before)
    assert (table.version, table.clocks.clock(1)) == (2, 1)
    assert table.report().workers[1].dropped == 1 and table.report().workers[1].updates == 0
    t.read(table, 1)
    t.step(table, 1, t.noise(4))
    assert table.version == 3 and not table.outcome(1).notice


def test_deltas_are_added_and_values_replace():
    deltas = make(Rule(bound=None, push="delta"))
    t.step(deltas, 0, t.noise(2))
    t.step(deltas, 1, t.noise(3))
    assert torch.equal(t.values(deltas), t.noise(1) + t.noise(2) + t.noise(3))
    plain = make(Rule(bound=None, push="params"))
    for _ in range(3):
        t.step(plain, 0, t.noise(2))
    t.step(plain, 1, t.noise(3))
    assert torch.equal(t.values(plain), t.noise(3))
    assert [report.overwritten for report in plain.report().workers] == [0, 3]


def test_tables_without_an_optimizer_need_none():
    table = t.table(Rule(bound=None, push="delta"), optimizer="", groups=())
    t.assign(table, t.noise(1))
    t.step(table, 0, t.noise(2))
    assert torch.equal(t.values(table), t.noise(1) + t.noise(2))
    assert table.state(0) == []
    with pytest.raises(UsageError, match="table 'model', shard 'part 0' has no optimizer"):
        table.load_state(0, [])


def test_plain_sgd_is_one_pass_and_no_memory():
    table = make(workers=(0,), ranges=t.WHOLE)
    t.step(table, 0, t.noise(2))
    t.push(table, 0, t.noise(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        t.commit(table, 0)
    num_pieces = sum(len(shard.pieces) for shard in table.spec.shards)
    events = profile.events()
    kernels = [e for e in events if e.name.startswith("aten::") and not e.cpu_children]
    work = [e.name for e in kernels if e.name not in VIEWS]
    assert work == ["aten::add_"] * num_pieces
    assert sum(event.self_cpu_memory_usage for event in kernels) <= 0


VIEWS = ("aten::narrow", "aten::slice", "aten::view", "aten::as_strided", "aten::detach")
