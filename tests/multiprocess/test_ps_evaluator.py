"""A worker that only watches: told of new versions of a model, and in nobody's way."""

import pytest
import torch

import paceline as pl
from paceline.errors import UsageError
from support import run_ranks

STEPS = 12


def _train_or_watch(group, pace: str):
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    if pl.rank() < 2:
        for _ in range(STEPS):
            model(torch.ones(4, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return None
    start, versions = model.weight.detach().clone(), []
    for version in model.subscribe():
        model.pull()
        versions.append(version)
    with pytest.raises(UsageError, match="worker 2"):
        model(torch.ones(4, 30)).sum().backward()
        optimizer.step()
    return versions, torch.equal(start, model.weight)


@pytest.mark.parametrize("hosts", [1, [0, 0, 1, 0, 1]])
@pytest.mark.parametrize("pace", ["async", "ssp:1"])
def test_an_evaluator_follows_a_model_and_holds_up_nobody(pace, hosts):
    versions, is_unchanged = run_ranks(3, _train_or_watch, pace, servers=2, hosts=hosts)[2]
    assert versions == sorted(set(versions))
    assert versions[-1] == 2 * STEPS
    assert not is_unchanged


def test_there_is_nothing_to_watch_in_lockstep():
    def body(group):
        found = []
        for pace in ("ps", "allreduce"):
            model = torch.nn.Linear(3, 1)
            model, _ = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), pace=pace)
            with pytest.raises(UsageError) as caught:
                model.subscribe()
            found.append(str(caught.value))
        return found

    lockstep, without = run_ranks(2, body, servers=1)[0]
    assert "for free-running paces" in lockstep
    assert "needs parameter servers" in without
