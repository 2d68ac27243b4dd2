"""Where the time of steps goes: the slow worker is found, and why it is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from run_support import wait_until
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import paceline as pl
from paceline.comm.group import Group
from paceline.observe.telemetry.events import Event, ProgressReport, ServerLoad
from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.step_times import StepTimes, WaitStats
from paceline.runtime import job
from support import started

STEPS, BATCH, LATE_S = 8, 4, 0.1  # late by much more than a busy machine makes others
SLOW = 1  # the rank that is

Steps = dict[int, list[StepTimes]]


def observed(
    body: Callable[..., Any], *arguments: Any, counted: int = STEPS, **how: Any
) -> tuple[Steps, list[Event]]:
    """Run a body on two workers until they have told of all steps; return those, by rank."""
    events: list[Event] = []

    def steps() -> Steps:
        told = [event for event in list(events) if isinstance(event, ProgressReport)]
        return {r: [s for one in told if one.rank == r for s in one.steps] for r in range(2)}

    with started(2, body, *arguments, on_event=events.append, **how) as ranks:
        ranks.values()
        wait_until(lambda: all(len(told) >= counted for told in steps().values()))
    found = steps()
    for told in found.values():
        assert [step.step for step in told] == list(range(1, counted + 1)), "each once"
        assert all(s.wait_s + s.input_s <= s.took_s + 1e-9 for s in told)
    return found, events


def slowest(steps: Steps) -> tuple[int | None, str]:
    waits = WaitStats()
    for rank, told in steps.items():
        waits.add(rank, told, 2)
    found = waits.bottleneck()
    assert found is not None, steps
    return found.worker, found.cause


def total(steps: list[StepTimes], part: str) -> float:
    return sum(getattr(step, part) for step in steps)


class Samples:
    """Random ones; those of the slow rank take long, a batch of them as long as a late step."""

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 2 * STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_slow:
            time.sleep(LATE_S / BATCH)
        return torch.full((3,), float(index))


class Streamed(IterableDataset):
    def __init__(self, is_slow: bool) -> None:
        self.samples = Samples(False)
        self.is_slow = is_slow

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(len(self.samples)):
            if self.is_slow:
                time.sleep(LATE_S / BATCH / 2)  # each worker reads the samples of both
            yield self.samples[index]


def made(pace: str = "allreduce") -> tuple[Any, Any]:
    model = nn.Linear(3, 1)
    return pl.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3), pace)


def learn(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_slowly(group: Group, kind: str, pace: str) -> None:
    is_slow = group.rank == SLOW
    data = Streamed(is_slow) if kind == "stream" else Samples(is_slow)
    model, optimizer = made(pace)
    loader = DataLoader(data, batch_size=BATCH, num_workers=int(kind == "process"))
    for x in pl.shard(loader):
        learn(model, optimizer, x)


@pytest.mark.parametrize("kind", ["plain", "process", "stream"])
def test_a_slow_loader_is_found(kind: str) -> None:
    steps, _ = observed(load_slowly, kind, "allreduce")
    assert slowest(steps) == (SLOW, "input")
    slow, fast = steps[SLOW], steps[1 - SLOW]
    assert total(slow, "input_s") > STEPS * LATE_S / 2
    assert total(fast, "wait_s") > total(fast, "input_s"), "who waits for others, not for its data"
    assert [step.samples for step in (*slow, *fast)] == [BATCH] * (2 * STEPS)


def compute_slowly(group: Group, pace: str) -> None:
    model, optimizer = made(pace)
    for _ in range(STEPS):
        if group.rank == SLOW:
            time.sleep(LATE_S)
        learn(model, optimizer, torch.ones(BATCH, 3))


@pytest.mark.parametrize("pace", ["allreduce[update=replicated]", "allreduce", "local:2", "ps"])
def test_a_slow_computation_is_found(pace: str) -> None:
    steps, events = observed(compute_slowly, pace, servers=int(pace == "ps"))
    assert slowest(steps) == (SLOW, "compute")
    assert total(steps[1 - SLOW], "wait_s") > STEPS * LATE_S / 2
    assert total(steps[SLOW], "local_s") > STEPS * LATE_S
    rates = [event.values.get("lr") for event in events if isinstance(event, ProgressReport)]
    assert rates and set(rates) == {1e-3}


def test_free_running_workers_tell_how_stale_they_are_and_servers_what_they_do() -> None:
    def body(group: Group) -> None:
        model, optimizer = made("async")
        for _ in range(STEPS):
            time.sleep(2.4 / STEPS)  # long enough for a report of the server
            learn(model, optimizer, torch.ones(BATCH, 3))

    steps, events = observed(body, servers=1)
    assert all(step.wait_s > 0 for told in steps.values() for step in told), "for the server"
    told = [event for event in events if isinstance(event, ProgressReport)]
    stale = [event.values["stale"] for event in told if "stale" in event.values]
    assert {event.rank for event in told if "stale" in event.values} == {0, 1}
    assert all(0 <= one <= 2 * STEPS for one in stale)
    loads = [event for event in events if isinstance(event, ServerLoad)]
    assert loads and max(load.queued for load in loads) >= 1
    assert sum(isinstance(event, TableReport) for event in events) >= 2, "not only at the end"


def test_batches_that_add_up_and_others_that_only_evaluate() -> None:
    def body(group: Group) -> None:
        model, optimizer = made()
        batches = iter(pl.shard(DataLoader(Samples(False), batch_size=2)))
        for _ in range(STEPS):
            with model.no_sync():
                model(next(batches)).square().mean().backward()
            learn(model, optimizer, next(batches))
            with torch.no_grad():
                for x in pl.shard(DataLoader(Samples(False), batch_size=BATCH)):
                    model(x)
        assert job.current().reporter.input_s > 0

    steps, _ = observed(body)
    assert [step.samples for told in steps.values() for step in told] == [4] * (2 * STEPS)
    assert all(step.input_s > 0 for told in steps.values() for step in told)


def test_samples_that_only_pad_do_not_count() -> None:
    def body(group: Group) -> None:
        model, optimizer = made()
        for x in pl.shard(DataLoader(range(9), batch_size=BATCH)):
            learn(model, optimizer, x.float().view(-1, 1).expand(-1, 3))

    steps, _ = observed(body, counted=2)
    assert [[step.samples for step in steps[rank]] for rank in range(2)] == [[4, 1], [4, 0]]


class Sleepy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(LATE_S / 2)
        return x


def pipe(group: Group) -> None:
    first, second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), Sleepy())
    model = nn.Sequential(first, second)
    model, _ = pl.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        mesh="pp=2",
        loss=F.mse_loss,
        example=torch.ones(BATCH, 3),
        splits=["1"],
        microbatches=2,
    )
    for x in pl.shard(DataLoader(Samples(False), batch_size=2 * BATCH)):
        model.train_step(x, x)


def test_a_slow_stage_makes_its_neighbour_wait() -> None:
    steps, _ = observed(pipe)
    assert slowest(steps) == (SLOW, "compute")
    assert total(steps[1 - SLOW], "wait_s") > STEPS * LATE_S / 2
    counted = [[step.samples for step in steps[rank]] for rank in range(2)]
    assert counted == [[2 * BATCH] * STEPS, [0] * STEPS], "the batches of a unit count once"


def test_off_tells_no_steps() -> None:
    events: list[Event] = []
    how = {"env": {"PACELINE_TELEMETRY": "off"}, "on_event": events.append}
    with started(2, load_slowly, "plain", "allreduce", **how) as ranks:
        ranks.values()
        wait_until(
            lambda: max((e.step for e in events if isinstance(e, ProgressReport)), default=0) == 8
        )
    told = [event for event in events if isinstance(event, ProgressReport)]
    assert not any(event.steps or "lr" in event.values for event in told)
