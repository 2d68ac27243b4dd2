"""Compensation for old updates: the formulas, and where they must change nothing."""

from __future__ import annotations

import pytest
import torch

from paceline.ps.server.table import Table
from paceline.ps.spec import Rule
from support import tables as t

RATES = ({"lr": 0.1}, {"lr": 0.1})
ORDER = (0, 1, 1, 0, 2, 0, 1, 2, 2, 2, 0, 1)
INITIAL = t.noise(1)


def run(rule: Rule, order=ORDER, optimizer="SGD", workers=(0, 1, 2)) -> Table:
    """Let workers step in an order, each reading right after its step."""
    table = t.table(rule, optimizer, RATES, workers=workers, ranges=t.CUT)
    t.assign(table, INITIAL)
    for worker in workers:
        t.read(table, worker)
    for number, worker in enumerate(order):
        t.step(table, worker, t.noise(100 + number))
        t.read(table, worker)
    return table


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("same", "workers", "order"),
    [
        (Rule(bound=None, compensate="dc", dc_lambda=0.0), (0, 1, 2), ORDER),
        (Rule(bound=None, compensate="dc", dc_lambda=2.0), (0,), (0,) * 6),  # never stale
        (Rule(bound=None, softsync=3), (0, 1, 2), ORDER),  # one update is a group
        (Rule(bound=None, softsync=2), (0, 1, 2), ORDER),
        (Rule(bound=None, lr="staleness"), (0,), (0,) * 6),
    ],
)
def test_equals_plain_asynchronous(same, workers, order, optimizer):
    plain = run(Rule(bound=None), order, optimizer, workers)
    other = run(same, order, optimizer, workers)
    assert torch.equal(t.values(other), t.values(plain))
    assert other.version == plain.version


def test_delay_compensation_keeps_one_backup_per_worker():
    values, read = INITIAL, dict.fromkeys((0, 1, 2), 0)
    given = dict.fromkeys((0, 1, 2), INITIAL)
    for version, worker in enumerate(ORDER):
        grad = t.noise(100 + version)
        if version > read[worker]:
            grad = grad + 0.5 * grad * grad * (values - given[worker])
        values = values - 0.1 * grad
        given[worker], read[worker] = values, version + 1
    table = run(Rule(bound=None, compensate="dc", dc_lambda=0.5))
    torch.testing.assert_close(t.values(table), values)
    plain = run(Rule(bound=None))
    assert not torch.allclose(t.values(table), t.values(plain))


def test_the_learning_rate_is_divided_by_the_staleness():
    table = run(Rule(bound=None, lr="staleness"), order=(0, 0, 0, 1, 2))
    rates = (0.1, 0.1, 0.1, 0.1 / 3, 0.1 / 4)
    alone = t.OneProcess(INITIAL, "SGD", RATES)
    for number, rate in enumerate(rates):
        alone.step(t.noise(100 + number), settings=({"lr": rate}, {"lr": rate}))
    assert torch.equal(t.values(table), alone.flat)
    assert [report.staleness for report in table.report().workers] == [{0: 3}, {3: 1}, {4: 1}]


def test_the_rate_of_one_update_is_not_the_next_ones():
    table = run(Rule(bound=None, lr="staleness"), order=(0, 0, 1, 1, 1))
    rates = (0.1, 0.1, 0.1 / 2, 0.1, 0.1)
    alone = t.OneProcess(INITIAL, "SGD", RATES)
    for number, rate in enumerate(rates):
        alone.step(t.noise(100 + number), settings=({"lr": rate}, {"lr": rate}))
    assert torch.equal(t.values(table), alone.flat)


def test_softsync_applies_the_mean_of_several_updates():
    table = run(Rule(bound=None, softsync=1), order=(0, 1, 2, 2, 2, 0))  # three make a version
    assert table.version == 2
    values = INITIAL
    for numbers in ((100, 101, 102), (103, 104, 105)):
        values = values - 0.1 * sum(t.noise(n) for n in numbers) / 3
    torch.testing.assert_close(t.values(table), values)


def test_softsync_weighs_by_staleness():
    table = run(Rule(bound=None, softsync=1, lr="staleness"), order=(0, 0, 0, 0, 0, 0, 1, 2, 0))
    assert table.version == 3
    values = INITIAL
    for version, ages in enumerate(((0, 0, 0), (0, 0, 0), (2, 2, 0))):
        grads = [t.noise(100 + 3 * version + i) / max(1, age) for i, age in enumerate(ages)]
        values = values - 0.1 * sum(grads) / 3
    torch.testing.assert_close(t.values(table), values)
    assert [report.staleness for report in table.report().workers] == [{0: 7}, {2: 1}, {2: 1}]


def test_a_pool_is_applied_when_too_few_are_left_to_fill_it():
    table = run(Rule(bound=None, softsync=1), order=(0, 1))
    assert table.version == 0
    table.leave(2)
    assert table.version == 1
    expected = INITIAL - 0.1 * (t.noise(100) + t.noise(101)) / 2
    torch.testing.assert_close(t.values(table), expected)
    t.step(table, 0, t.noise(5))
    table.leave(0)
    table.leave(1)
    assert table.version == 2


def test_a_pooled_update_stays_when_its_memory_is_used_again():
    table = run(Rule(bound=None, softsync=1), order=())
    grad = t.noise(2)
    for worker in (0, 1, 2):
        t.step(table, worker, grad)
        grad.zero_()
    torch.testing.assert_close(t.values(table), INITIAL - 0.1 * t.noise(2) / 3)
