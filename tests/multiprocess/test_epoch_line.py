"""What is said at the end of an epoch is what the workers got."""

from __future__ import annotations

import time
from typing import Any

import torch
from run_support import wait_until
from torch.utils.data import DataLoader, IterableDataset

import paceline as pl
from paceline.comm.group import Group
from paceline.data import pass_report
from paceline.observe.telemetry.events import EpochEnded, Event
from paceline.runtime import job
from support import started


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(14))


def got(sharded: Any) -> list[Any]:
    """The samples that count, and how many repeated ones do not."""
    contribution, samples, padded = job.current().contribution, 0, 0
    for batch in sharded:
        samples += len(batch) if contribution.weight else 0
        padded += not contribution.weight
    return [samples, padded]


def test_the_numbers_are_what_was_handed_out() -> None:
    def battery(group: Group) -> list[Any]:
        loaders = {
            "plain": (DataLoader(range(14), 2), {}),
            "dropped": (DataLoader(range(14), 2, drop_last=True), {}),
            "drawn": (DataLoader(range(14), 2, sampler=[3, 3, 3, 1, 0, 9]), {}),
            "stream": (DataLoader(Numbers(), 2), {}),
            "own": (DataLoader(range(3 + group.rank), 2), {"presharded": True}),
        }
        found = [got(pl.shard(loader, **options)) for loader, options in loaders.values()]
        found.append(got(pl.shard([torch.ones(2)] * 4)))
        list(pl.shard(DataLoader(range(14), 2), pad=False))  # an evaluation: nothing is said
        for _ in pl.shard(DataLoader(range(14), 2)):
            break  # it did not come to its end
        return found

    events = list[Event]()

    def told_of() -> list[EpochEnded]:
        return [event for event in list(events) if isinstance(event, EpochEnded)]

    with started(3, battery, on_event=events.append) as ranks:
        found = ranks.values()
        said, others = ranks.output(0), ranks.output(1) + ranks.output(2)
        wait_until(lambda: len(told_of()) >= 6, within_s=50)  # in the coordinator's thread
    told = told_of()
    handed = [[sum(of_rank) for of_rank in zip(*case)] for case in zip(*found, strict=True)]  # noqa: B905
    assert [[event.samples, event.padded] for event in told] == handed
    assert [event.dropped for event in told] == [0, 2, 0, 0, 0, 0]
    assert [event.loader for event in told] == [*(f"loader {i}" for i in range(5)), "others"]
    assert handed[0] == [14, 1] and handed[1] == [12, 0] and handed[2] == [6, 0]
    assert "paceline: epoch 0: 14 samples, each once; 1 padded with weight 0\n" in said
    assert "epoch 0 (loader 1): 12 samples, each once; 2 dropped (drop_last)\n" in said
    assert "epoch 0 (loader 2): 6 draws of the sampler, each once\n" in said
    assert said.count("epoch 0") == 6 and "epoch" not in others


def test_many_epochs_are_summed_up() -> None:
    def battery(group: Group) -> None:
        pass_report._SHORT_S = 60.0  # a second may pass on a busy machine
        loader = DataLoader(range(12), 2)
        warmup = pl.data_warmup(0.5, epochs=40)
        for epoch in range(45):
            for _ in pl.shard(loader, epoch=epoch, warmup=warmup):
                pass
        slow = DataLoader(range(2), 1)
        for epoch in range(5):
            pass_report._SHORT_S = 0.05 if epoch == 4 else 60.0
            for _ in pl.shard(slow, epoch=epoch):
                time.sleep(0.1 if epoch == 4 else 0.0)

    with started(2, battery) as ranks:
        ranks.values()
        said = [line for line in ranks.output(0).splitlines() if "epoch" in line and ":" in line]
    said = [line for line in said if "shard:" not in line]
    first = [line for line in said if "loader 1" not in line and "more" not in line]
    assert len(first) == 4  # three, and the one that differs
    assert first[-1].endswith("epoch 40: 12 samples, each once")
    assert "paceline: epochs 3 to 44: 41 more, 270 samples in all" in said
    slow = [line for line in said if "loader 1" in line]
    assert len(slow) == 4 and "epoch 4 (loader 1)" in slow[-1]


def test_alone_it_is_quiet() -> None:
    def battery(group: Group) -> None:
        pl.shutdown()
        import os

        for name in [name for name in os.environ if name.startswith("PACELINE_")]:
            del os.environ[name]
        pl.init()
        assert len(list(pl.shard(DataLoader(range(12), 2)))) == 6

    with started(1, battery) as ranks:
        ranks.values()
        assert "epoch" not in ranks.output(0)
