"""Training scripts whose batches are recorded, for runs that resume from a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import paceline as pl
from paceline.data.cursor.resumption import data_state
from paceline.runtime import job

EPOCHS = 3


class Noisy(Dataset):
    """Samples with augmentation: a random number of each kind of generator."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), float(torch.rand(())), random.random(), float(np.random.rand())]


class NoisyStream(IterableDataset):
    """The same as a stream, divided among DataLoader workers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[float]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (Noisy(self.samples)[i] for i in range(first, self.samples, step))


class Seeded(Dataset):
    """No noise."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        return [float(index)]


class Recorder:
    """Records every batch of a script, and in the middle of it the state for a checkpoint."""

    def __init__(self, save_at: int | None, steps: int = 0) -> None:
        self.save_at, self.steps = save_at, steps
        self.seen: list[Any] = []  # epoch, batch, weight
        self.saved: Any = None

    def evaluate(self, epoch: int, batch: Any) -> None:
        self.seen.append([f"evaluation {epoch}", plain(batch), 1.0])

    def step(self, epoch: int, *batches: Any) -> None:
        weight = job.current().contribution.weight
        self.seen.append([epoch, [plain(batch) for batch in batches], weight])
        job.current().contribution.commit()
        torch.rand(1)  # dropout
        self.steps += 1
        if self.steps == self.save_at:
            self.save()

    def save(self) -> None:
        """Record the state for a checkpoint."""
        if self.save_at is not None:
            state = json.loads(json.dumps(data_state(job.current())))
            self.saved = state, torch.get_rng_state(), random.getstate(), np.random.get_state()
            self.seen.append("saved")


def plain(batch: Any) -> Any:
    if isinstance(batch, list):
        return torch.stack([torch.as_tensor(column) for column in batch], -1).tolist()
    return batch.tolist()


def over(make: Callable[[], Any], **options: Any) -> Callable[[Recorder], None]:
    """Return the usual script: epochs by hand, the loader created once."""

    def script(recorder: Recorder) -> None:
        loader = make()
        for epoch in range(EPOCHS):
            for batch in pl.shard(loader, epoch=epoch, **options):
                recorder.step(epoch, batch)

    return script


def with_evaluation(recorder: Recorder) -> None:
    train, test = DataLoader(Noisy(41), 3, shuffle=True), DataLoader(Noisy(10), 3)
    for epoch in range(EPOCHS):
        for batch in pl.shard(train):
            recorder.step(epoch, batch)
            if recorder.steps % 4 == 0:
                for one in pl.shard(test, pad=False):
                    recorder.evaluate(epoch, one)
        for batch in pl.shard(test, pad=False):
            recorder.evaluate(epoch, batch)


def in_epochs(recorder: Recorder) -> None:
    for epoch in pl.epochs(EPOCHS):
        before = DataLoader(Noisy(10), 3)  # a new loader in each epoch
        for batch in pl.shard(before, pad=False):
            recorder.evaluate(epoch, batch)
        train = DataLoader(Noisy(41), 3, shuffle=True)
        for batch in pl.shard(train, epoch=epoch):
            recorder.step(epoch, batch)
        for batch in pl.shard(before, pad=False):
            recorder.evaluate(epoch, batch)


def at_the_end_of_epochs(recorder: Recorder) -> None:
    train, test = DataLoader(Noisy(41), 3, shuffle=True), DataLoader(Noisy(10), 3)
    for epoch in pl.epochs(EPOCHS):
        for batch in pl.shard(train):
            recorder.step(epoch, batch)
        for batch in pl.shard(test, pad=False):
            recorder.evaluate(epoch, batch)
        if epoch == 1:
            recorder.save()


def in_steps(recorder: Recorder) -> None:
    first, second = DataLoader(Noisy(41), 3, shuffle=True), DataLoader(Noisy(17), 2)

    def forever(loader: Any) -> Iterator[Any]:
        while True:
            yield from pl.shard(loader)

    ones, twos = forever(first), forever(second)
    for number in pl.steps(25):
        recorder.step(number, next(ones), next(twos))


def by_itself(recorder: Recorder) -> None:
    """A script that knows its epoch from its own checkpoint."""
    train, test = DataLoader(Noisy(41), 3, shuffle=True), DataLoader(Noisy(10), 3)
    for epoch in range(0 if recorder.save_at else 1, EPOCHS):
        for batch in pl.shard(train, epoch=epoch):
            recorder.step(epoch, batch)
        for batch in pl.shard(test, pad=False):
            recorder.evaluate(epoch, batch)


def over_generators(recorder: Recorder) -> None:
    for epoch in range(EPOCHS):
        for batch in pl.shard(torch.full((2,), float(i)) for i in range(21)):
            recorder.step(epoch, batch)


def over_lists(recorder: Recorder) -> None:
    for epoch in range(EPOCHS):
        for batch in pl.shard([torch.full((1 + i % 3,), float(i)) for i in range(21)]):
            recorder.step(epoch, batch)


def buckets() -> Any:
    return BatchSampler(RandomSampler(range(41)), 3, False)


def own_part() -> Any:
    mine = range(pl.rank(), 41, pl.world_size())
    return DataLoader(Noisy(41), 3, sampler=torch.utils.data.SubsetRandomSampler(mine))


SCRIPTS: dict[str, Callable[[Recorder], None]] = {
    "shuffled": over(lambda: DataLoader(Noisy(41), 3, shuffle=True)),
    "plain": over(lambda: DataLoader(Noisy(41), 3)),
    "global": over(lambda: DataLoader(Noisy(41), 5, shuffle=True), batch="global"),
    "by speed": over(lambda: DataLoader(Noisy(41), 3, shuffle=True), batch="auto"),
    "dropped": over(lambda: DataLoader(Noisy(41), 3, shuffle=True, drop_last=True)),
    "warmed up": over(
        lambda: DataLoader(Noisy(41), 1, shuffle=True), warmup=pl.data_warmup(0.5, epochs=2)
    ),
    "processes": over(lambda: DataLoader(Noisy(41), 3, shuffle=True, num_workers=2)),
    "lasting processes": over(
        lambda: DataLoader(Noisy(41), 3, num_workers=1, persistent_workers=True)
    ),
    "sampler": over(
        lambda: DataLoader(Noisy(41), 3, sampler=WeightedRandomSampler([1.0] * 41, 41))
    ),
    "batch sampler": over(lambda: DataLoader(Noisy(41), batch_sampler=buckets())),
    "items": over(lambda: DataLoader(Seeded(41), batch_size=None)),
    "stream": over(lambda: DataLoader(NoisyStream(41), 3)),
    "stream processes": over(lambda: DataLoader(NoisyStream(41), 3, num_workers=2)),
    "presharded": over(own_part, presharded=True),
    "lists": over_lists,
    "generators": over_generators,
    "evaluation": with_evaluation,
    "epochs": in_epochs,
    "rounds": at_the_end_of_epochs,
    "steps": in_steps,
    "by itself": by_itself,
}
SAVE_AT = {"rounds": 0, "items": 31, "lists": 15, "generators": 15, "global": 13, "warmed up": 17}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
