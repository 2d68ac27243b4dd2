"""Free-running paces do not diverge without a word: what one update is, and that the loss rises."""

from __future__ import annotations

import re

import pytest
from run_support import Workbench

SCRIPT = """
    import paceline as pl, torch

    pl.init()
    torch.manual_seed(pl.rank())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    pl.distribute(model, optimizer)
    for step in range(150):
        x = torch.randn(16, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pl.report(loss=loss.item())
    """
UPDATE = r"one update is the gradient of one worker instead of the mean of 2"
RISEN = r"the reported loss"


@pytest.fixture
def bench(tmp_path) -> Workbench:
    return Workbench(tmp_path)


def notices(bench: Workbench, rate: str, *words: str) -> list[str]:
    script = bench.script(SCRIPT.replace("RATE", rate))
    done = bench.run("run", "-n", "2", *words, script)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if re.search(f"{UPDATE}|{RISEN}", line)]


def test_a_rate_that_is_too_high_is_named(bench) -> None:
    first, second = notices(bench, "3.0", "-s", "1", "--pace", "async")
    assert re.search(rf"async: {UPDATE}, about 1 update of others late", first)
    assert "momentum 0.9" in first
    for remedy in ("lower learning rate", "lr=staleness", "softsync=1"):
        assert remedy in first and remedy in second
    assert re.search(r"the reported loss (is not finite|has risen from)", second)


def test_a_rate_that_is_right_is_not(bench) -> None:
    only = notices(bench, "0.005", "-s", "1", "--pace", "ssp:3[lr=staleness]")
    assert len(only) == 1 and "lr=staleness" not in only[0].partition("If the loss rises")[2]
