"""Gradients that are NaN or infinite, under every policy: named, counted, never half applied."""

from __future__ import annotations

import pytest
import torch

from paceline.ps.server.table import Table
from paceline.ps.spec import Rule
from support import tables as t

RATES = ({"lr": 0.1}, {"lr": 0.1})
BAD = ("inf", "-inf", "nan")
NAMED = "a gradient in shard 'part 1' is NaN or infinite (worker 1: second.weight)"


def make(policy: str, *, aggregate: bool, workers=(0, 1, 2)) -> Table:
    bound = 0 if aggregate else None
    table = t.table(
        Rule(bound, aggregate=aggregate, nonfinite=policy), "SGD", RATES, workers=workers
    )
    t.assign(table, t.noise(1))
    return table


def grads(bad: str | None = "nan") -> list[torch.Tensor]:
    """Return the gradients of three workers, of which worker 1's has a bad number."""
    found = [t.noise(2), t.noise(3), t.noise(4)]
    if bad is not None:
        found[1][300] = float(bad)
    return found


def step_all(table: Table, pushed: list[torch.Tensor]) -> None:
    for worker, grad in enumerate(pushed):
        t.push(table, worker, grad)
    for worker in range(len(pushed)):
        t.commit(table, worker)


def skipped(table: Table) -> list[int]:
    return [report.skipped for report in table.report().workers]


@pytest.mark.parametrize("bad", BAD)
def test_synchronous_raise_tells_all_workers_and_applies_nothing(bad):
    table = make("raise", aggregate=True)
    step_all(table, grads(bad))
    for worker in (0, 1, 2):
        outcome = table.outcome(worker)
        assert outcome.error == "NonFiniteGradient" and NAMED in outcome.text
        assert "table 'model'" in outcome.text and "nonfinite=skip" in outcome.text
    assert torch.equal(t.values(table), t.noise(1))
    assert (table.version, table.clocks.clock(1)) == (0, 1)
    step_all(table, grads(None))
    assert table.version == 1 and not table.outcome(0).error


def test_the_verdict_is_known_with_the_average():
    table = make("skip", aggregate=True)
    for worker, grad in enumerate(grads()):
        t.push(table, worker, grad)
    assert (table.problem(0), table.problem(1)) == ("", NAMED)
    for worker, grad in enumerate(grads(None)):  # all leave the step out
        t.push(table, worker, grad)
    assert table.problem(1) == ""


def test_synchronous_skip_leaves_the_step_out():
    table = make("skip", aggregate=True)
    step_all(table, grads())
    assert table.outcome(2).notice == f"table 'model': {NAMED}; the step is left out"
    assert not table.outcome(2).error
    assert torch.equal(t.values(table), t.noise(1)) and table.version == 0
    assert skipped(table) == [1, 1, 1]


def test_synchronous_quarantine_averages_the_others():
    table = make("quarantine", aggregate=True)
    pushed = grads()
    step_all(table, pushed)
    assert table.outcome(0).notice == f"{NAMED}; it is left out of the average"
    mean = torch.cat([sum(pushed)[:264] / 3, ((pushed[0] + pushed[2]) / 2)[264:]])
    torch.testing.assert_close(t.values(table), t.noise(1) - 0.1 * mean)
    assert skipped(table) == [0, 1, 0] and table.version == 1


def test_quarantine_of_all_leaves_the_step_out():
    table = make("quarantine", aggregate=True, workers=(0, 1))
    bad = grads()[1]
    step_all(table, [bad, bad])
    assert "(worker 0: second.weight; worker 1: second.weight); the step" in table.outcome(0).notice
    assert torch.equal(t.values(table), t.noise(1))


def test_a_sum_that_overflows_is_nobodys():
    table = make("raise", aggregate=True, workers=(0, 1))
    step_all(table, [torch.full((t.NUM_ELEMENTS,), 3e38)] * 2)
    assert "no worker's alone: the sum over the workers overflowed" in table.outcome(1).text


@pytest.mark.parametrize("policy", ["raise", "skip", "quarantine"])
def test_an_asynchronous_update_is_left_out_whole(policy):
    table = make(policy, aggregate=False)
    step_all(table, grads())
    outcome = table.outcome(1)
    if policy == "raise":
        assert outcome.error == "NonFiniteGradient" and NAMED in outcome.text
    else:
        assert outcome.notice == f"table 'model': {NAMED}; its update is not applied"
    assert not table.outcome(0).error and not table.outcome(2).notice
    alone = t.OneProcess(t.noise(1), "SGD", RATES)
    alone.step(t.noise(2))
    alone.step(t.noise(4))
    assert torch.equal(t.values(table), alone.flat)
    assert (table.version, table.clocks.clock(1), skipped(table)) == (2, 1, [0, 1, 0])


@pytest.mark.parametrize("aggregate", [True, False])
def test_ignore_applies_what_comes(aggregate):
    table = make("ignore", aggregate=aggregate)
    step_all(table, grads())
    assert t.values(table).isnan().sum() == 1
    assert not table.outcome(1).error and not table.outcome(1).notice


@pytest.mark.parametrize("aggregate", [True, False])
def test_what_a_parameter_without_gradient_has_is_not_looked_at(aggregate):
    table = make("raise", aggregate=aggregate, workers=(0,))
    t.push(table, 0, grads()[1], absent=(2,))
    t.commit(table, 0)
    assert not table.outcome(0).error and table.version == 1
