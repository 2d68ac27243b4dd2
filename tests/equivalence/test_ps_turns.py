"""Free-running workers whose turns are fixed equal one process that remembers who has read what.

    bounds and softsync groups that change nothing, DC with lambda near 0        async, to the bit
    lr=staleness, dropped and pooled updates, DC                                 their definitions
    lr=staleness, when nobody is staler than one version                         async, to the bit

How stale every update was is compared as well, with what the servers have counted.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from ways import Result, newest_reports, noise, require_equal, result_of

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

TURNS = (0, 1, 2, 1, 0, 0, 2, 1, 1, 1, 0, 2, 2, 0, 1, 2, 0, 2)
LR, DC_LAMBDA = 0.02, 0.5
Histograms = list[dict[int, int]]  # of each worker: how often an update was how stale


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(10, 150), nn.Tanh(), nn.Linear(150, 300), nn.Linear(300, 2))
    model.double()  # where rounding matters least
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5, weight_decay=1e-3)


def loss_of(model: nn.Module, turn: int) -> torch.Tensor:
    x = noise(8, 10, seed=turn, dtype=torch.float64)
    y = noise(8, 2, seed=50 + turn, dtype=torch.float64)
    return (model(x) - y).square().mean()


# -- in the ranks ---------------------------------------------------------------------------------


def take_turns(
    group: Group, paces: list[str], turns: tuple[int, ...]
) -> list[tuple[Result, list[Histograms]]]:
    return [take_turns_at(group, pace, turns) for pace in paces]


def take_turns_at(
    group: Group, pace: str, turns: tuple[int, ...]
) -> tuple[Result, list[Histograms]]:
    """Train one after the other, each with the values that it read at the end of its last step."""
    model, optimizer = make()
    pl.distribute(model, optimizer, pace=pace)
    for turn, who in enumerate(turns):
        if who == group.rank:
            optimizer.zero_grad()
            loss_of(model, turn).backward()
            optimizer.step()
        group.barrier()
    model.pull()
    counted = [[worker.staleness for worker in report.workers] for report in newest_reports()]
    group.barrier()
    return result_of(model, optimizer), counted


# -- one process ----------------------------------------------------------------------------------


class Imitation:
    """Does in one process what the servers must do."""

    def __init__(self, kind: str, num_workers: int) -> None:
        self.kind, self.num_workers = kind, num_workers
        self.model, self.optimizer = make()
        self.version = 0
        self.staleness: list[list[int]] = [[] for _ in range(num_workers)]
        self._read = [(0, self._values())] * num_workers  # version and values of each worker
        self._pool: list[list[torch.Tensor]] = []

    def run(self, turns: tuple[int, ...]) -> Imitation:
        for turn, who in enumerate(turns):
            if self.kind == "fresh":  # with a bound in versions, it reads when it begins
                self._read[who] = (self.version, self._values())
            version, given = self._read[who]
            staleness = self.version - version
            if self.kind != "drop" or staleness <= 1:
                self.staleness[who].append(staleness)
                self._push(_gradients(given, turn), given, staleness)
            self._read[who] = (self.version, self._values())
        return self

    def _push(self, grads: list[torch.Tensor], given: list[torch.Tensor], staleness: int) -> None:
        if self.kind == "compensate" and staleness:
            grads = [
                torch.addcmul(g, (now - then) * g, g, value=DC_LAMBDA)
                for g, now, then in zip(grads, self._values(), given, strict=True)
            ]
        if self.kind == "pool":
            self._pool.append(grads)
            if len(self._pool) < self.num_workers:
                return
            grads = [sum(parts) / len(parts) for parts in zip(*self._pool, strict=True)]
            self._pool.clear()
        divisor = max(staleness, 1) if self.kind == "slow" else 1
        self.optimizer.param_groups[0]["lr"] = LR / divisor
        for param, grad in zip(self.model.parameters(), grads, strict=True):
            param.grad = grad
        self.optimizer.step()
        self.version += 1

    def _values(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def result(self) -> Result:
        self.optimizer.param_groups[0]["lr"] = LR
        return result_of(self.model, self.optimizer)


def _gradients(values: list[torch.Tensor], turn: int) -> list[torch.Tensor]:
    model, _ = make()
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)
    loss_of(model, turn).backward()
    return [param.grad for param in model.parameters()]


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks compute with one thread; how many there are may change the order of adding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


KINDS = {
    "async": "plain",
    "async[compensate=dc,dc_lambda=1e-35]": "plain",
    "async[softsync=3]": "plain",
    "async[max_staleness=99]": "plain",
    "ssp:99": "plain",
    "ssp:99[unit=version]": "fresh",
    f"async[compensate=dc,dc_lambda={DC_LAMBDA}]": "compensate",
    "async[lr=staleness]": "slow",
    "async[max_staleness=1]": "drop",
    "async[softsync=1]": "pool",
}


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 0, 0, 1]])
def test_workers_that_take_turns_equal_one_process(hosts: list[int]) -> None:
    by_rank = run_ranks(3, take_turns, list(KINDS), TURNS, servers=len(hosts) - 3, hosts=hosts)
    different = set()
    for number, (pace, kind) in enumerate(KINDS.items()):
        imitation = Imitation(kind, 3).run(TURNS)
        expected = imitation.result()
        different.add(float(expected["/model/0.weight"].sum()))
        for result, counted in (results[number] for results in by_rank):
            require = require_close if kind == "compensate" else require_equal
            require(result, expected, pace)
            for of_server in counted:
                assert of_server == [dict(Counter(s)) for s in imitation.staleness], pace
    assert len(different) == len(set(KINDS.values()))


def test_a_rate_divided_by_one_is_the_rate() -> None:
    paces = ["async", "async[lr=staleness]"]
    (plain, _), (slowed, counted) = run_ranks(2, take_turns, paces, (0, 1) * 6, servers=1)[0]
    assert counted[0] == [{0: 1, 1: 5}, {1: 6}]
    require_equal(slowed, plain, "lr=staleness")


def require_close(found: Result, expected: Result, what: str) -> None:
    """Compare but for rounding, which is not the same for a tensor and for a part of it."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}"
            )
