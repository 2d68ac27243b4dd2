"""Where pinned memory is scarce, and where a model is only partly on the test device: same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.data_parallel.distribute import distributed
from paceline.errors import UsageError
from support.devices import (
    device_outcomes,
    load_device,
    require_no_wait_of_the_script,
    run_on_device,
)
from support.ranks import run_ranks

STEPS = 4
PACES = ("ps", "local:2", "allreduce[compress=topk:0.1(min=100)]", "async[push=delta]")


class Halves(nn.Module):
    """An embedding that may stay on the CPU, and layers for the device."""

    def __init__(self, device: torch.device, *, is_mixed: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(50, 24)
        self.layers = nn.Sequential(nn.Linear(24, 200), nn.Tanh(), nn.Linear(200, 40)).to(device)
        if not is_mixed:
            self.table.to(device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(ids).to(next(self.layers.parameters()).device))


def train(rank: int, device: torch.device, pace: str, *, is_mixed: bool) -> list[torch.Tensor]:
    model = Halves(device, is_mixed=is_mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    placement = "mixed" if is_mixed and device.type != "cpu" else "one"
    pl.distribute(model, optimizer, pace=pace, bucket_mb=0.02, placement=placement)
    laggard = load_device() if device.type != "cpu" else None
    for step in range(STEPS):
        torch.manual_seed(10 * step + (0 if "async" in pace else rank))
        ids, labels = torch.randint(0, 50, (6,)), torch.randint(0, 40, (6,)).to(device)
        ids = ids.to(model.table.weight.device)
        if laggard is not None:
            torch.accelerator.synchronize()
            laggard.take_synchronizations()
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()
        if laggard is not None and not is_mixed:  # else the script itself moves activations
            require_no_wait_of_the_script(laggard)
    with model.agreed():
        return [p.detach().cpu().clone() for p in model.parameters()]


def on_cpu(world, paces):
    return {pace: train(world.rank, torch.device("cpu"), pace, is_mixed=False) for pace in paces}


def on_device(world, paces, memory: str, is_mixed: bool):
    laggard = load_device()
    torch.ones(1, device=pl.device())  # starts the device
    if memory != "registered":
        del torch.laggard.register_host_memory  # type: ignore[attr-defined]
    if memory == "ordinary":
        refuse_to_pin()
    found = {}
    for number, pace in enumerate(paces):
        before = torch.laggard.host_memory_stats()["allocated_bytes.current"]  # type: ignore[attr-defined]
        found[pace] = train(world.rank, pl.device(), pace, is_mixed=is_mixed)
        most = torch.laggard.host_memory_stats()["allocated_bytes.peak"]  # type: ignore[attr-defined]
        buckets = distributed()[number][1].training.reducer.buckets
        allowed = 2 * max(b.params.nbytes for b in buckets) if memory == "staged" else 0
        assert most - before <= allowed, (pace, memory, most - before, allowed)
    del laggard
    return found


def refuse_to_pin() -> None:
    """Let torch refuse to pin, as on a machine on which no memory may be locked."""
    empty = torch.empty

    def refusing(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no memory may be locked")
        return empty(*arguments, **options)

    torch.empty = refusing  # type: ignore[assignment]


@pytest.fixture(scope="module")
def right() -> list[Any]:
    both = run_ranks(2, on_cpu, PACES[:3], servers=1)
    [alone] = run_ranks(1, on_cpu, PACES[3:], servers=1)
    return [*both, alone]


@pytest.mark.parametrize(
    ("memory", "is_mixed"),
    [("registered", False), ("staged", False), ("ordinary", False), ("registered", True)],
)
def test_all_kinds_of_memory_have_the_bits_of_the_cpu(memory, is_mixed, schedule, right):
    options: dict[str, Any] = {"schedule": schedule, "servers": 1, "timeout_s": 120}
    outcomes = device_outcomes(2, on_device, PACES[:3], memory, is_mixed, **options)
    says = [o.output.count("cannot pin host memory") for o in outcomes[:2]]
    assert says == [1 if memory == "ordinary" else 0] * 2, "\n".join(map(str, outcomes))
    found = [outcome.value for outcome in outcomes[:2]]
    found += run_on_device(1, on_device, PACES[3:], memory, is_mixed, **options)
    for expected, got in zip(right, found, strict=True):
        for pace, values in expected.items():
            torch.testing.assert_close(
                got[pace], values, rtol=0, atol=0, msg=lambda m, p=pace: p + m
            )


def test_hogwild_is_refused():
    def body(world):
        del world
        model = nn.Linear(4, 4).to(pl.device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="one memory of the host, and not to parameters on"):
            pl.distribute(model, optimizer, pace="hogwild")

    run_on_device(2, body, schedule="1")


def test_memory_is_not_overwritten_before_the_device_has_read_it(schedule):
    """Servers of another host send fresh values, while the device has not read the last ones."""

    def body(world):
        del world
        load_device()
        torch.manual_seed(0)
        model = nn.Linear(300, 200).to(pl.device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pl.distribute(model, optimizer, pace="async")
        model(torch.ones(2, 300, device=pl.device())).sum().backward()
        optimizer.step()
        for _ in range(3):
            model.pull()
        return model.weight.detach().cpu()

    [found] = run_on_device(1, body, schedule=schedule, servers=1, hosts=[0, 1])
    torch.manual_seed(0)
    right = nn.Linear(300, 200).weight.detach() - 0.1 * 2.0
    torch.testing.assert_close(found, right)
