"""A loader whose batches data workers make: on a trainer the source of its passes, on a data worker
the place where the script stops and the service begins.

Loaders are counted as the script passes them to `pl.shard(..., mode="pipeline")`: trainers and data
workers run the same script, so the n-th is the same loader everywhere, which orders make sure of.
A data worker serves all that it has been given when the script first iterates one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline import _core
from paceline.comm.group import Group
from paceline.data.cursor.passes import Pass
from paceline.data.randomness import mixed
from paceline.data.sources.sources import Indexed, Stream, set_epoch
from paceline.data.sources.synchronized_stream import own_batches
from paceline.data.split.plan import DataWarmup, plan
from paceline.data.workers.feed import Feed, Numbered
from paceline.data.workers.recipe import Recipe, Stage
from paceline.data.workers.service import say_serving, serve, stage_members
from paceline.data.workers.supply import Supply
from paceline.errors import UsageError
from paceline.runtime.job import Job, current

_AHEAD = 2  # batches for each data worker, unless the loader has a prefetch_factor


@dataclass
class _Owned:
    """What this process has of one job's data workers."""

    job: weakref.ref[Job]
    numbers: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    recipes: list[Recipe] = field(default_factory=list)  # by number, on a data worker
    unknown: set[int] = field(default_factory=set)  # numbers that data workers do not know
    supply: Supply | None = None
    _counted: int = 0

    def number_of(self, loader: Any) -> int:
        """Return the number of a loader; a new one if it has not come before."""
        if loader not in self.numbers:
            self.numbers[loader] = self._counted
            self._counted += 1
        return self.numbers[loader]


_owned: _Owned | None = None


def _of(job: Job) -> _Owned:
    global _owned
    if _owned is None or _owned.job() is not job:
        _owned = _Owned(weakref.ref(job))
    return _owned


def offer(
    loader: Any, stages: Sequence[Stage], batch: str, *, pad: bool, is_pipeline: bool
) -> Offered:
    """On a data worker: take note of a loader."""
    if is_pipeline:
        require_loader(loader, stages)
        owned = _of(current())
        number = owned.number_of(loader)
        owned.recipes[number:] = [Recipe(loader, stages), *owned.recipes[number + 1 :]]
    return Offered(loader, batch, pad=pad, is_pipeline=is_pipeline)


class Offered:
    """What `pl.shard` returns on a data worker. To iterate it is to serve, and does not return; a
    loader of another mode gives no batches here."""

    def __init__(self, loader: Any, batch: str, *, pad: bool, is_pipeline: bool) -> None:
        self._loader, self._batch = loader, batch
        self._pad, self._is_pipeline = pad, is_pipeline

    def __iter__(self) -> Iterator[Any]:
        if self._is_pipeline:
            job = current()
            say_serving(job, _of(job).recipes)
            serve(job, _of(job).recipes)
        return iter(())

    def __len__(self) -> int:
        """Return the number of batches that rank 0 gets: schedules are made from it."""
        if not self._is_pipeline:
            return len(self._loader)
        workers = current().env.world_size
        if isinstance(self._loader.dataset, IterableDataset):
            length = Stream(self._loader, workers, self._batch).length
        else:
            made = plan(self._loader, workers, self._batch, pad=self._pad)
            length = made.num_steps(workers, 0, pad=self._pad)
        if length is None:
            raise TypeError("the number of batches of this loader is not known")
        return length


def require_loader(loader: Any, stages: Sequence[Stage]) -> None:
    """Refuse what data workers cannot make."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"mode='pipeline' needs a DataLoader, found a {type(loader).__name__}: data workers"
            " make batches from its dataset; use mode='shard' for what yields batches itself"
        )
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(loader), name) is not getattr(DataLoader, name):
            raise UsageError(
                f"mode='pipeline': {type(loader).__name__} has a way of its own to iterate"
                f" ({name}), which data workers would leave out; do that in the dataset or in"
                " collate_fn, or use mode='shard'"
            )
    for stage in stages:
        if not callable(stage):
            raise UsageError(f"stages={stages!r:.80}: expected functions of a sample")


def _supply_of(job: Job) -> Supply | None:
    owned = _of(job)
    if owned.supply is None and job.env.data_workers:
        _core.keep_freed_memory()  # batches from other hosts land in fresh memory
        last = len(job.env.data_workers) - 1
        agent, makers = job.rendezvous.agent, stage_members(job, last)
        owned.supply = Supply(job.fabric, agent, makers, reads=last == 0)
    return owned.supply


class _Fed:
    """What trainers need for a loader whose batches data workers make."""

    def __init__(self, loader: DataLoader[Any], stages: Sequence[Stage]) -> None:
        require_loader(loader, stages)
        job = current()
        if job.elastic.is_on:
            raise UsageError(
                "mode='pipeline' in an elastic job: data workers cannot follow changes of the"
                " workers; use mode='shard' (and num_workers of the DataLoader), or a job without"
                " --min, --max and --on-loss"
            )
        owned, self._pins = _of(job), loader.pin_memory
        number = owned.number_of(loader)
        self._numbered = Numbered(number, Recipe(loader, stages), owned.unknown)
        per_worker = loader.prefetch_factor or _AHEAD
        self.lookahead = per_worker * max(1, sum(job.env.data_workers))

    def feed(self, this: Pass) -> Feed:
        """Begin a pass."""
        supply = _supply_of(current())
        if supply is None:
            this.say(
                "shard: mode='pipeline' without data workers: each worker makes its batches itself"
                " (paceline run --data-workers 2)"
            )
        return Feed(self._numbered, supply, this, self.lookahead, pin_memory=self._pins)


class Piped(Indexed):
    """A DataLoader whose samples have indices, and whose batches data workers make."""

    def __init__(self, fed: _Fed, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fed, self.lookahead = fed, fed.lookahead

    def _maker(self, this: Pass) -> Feed:
        return self._fed.feed(this)


class PipedStream(Stream):
    """A DataLoader over an iterable dataset, which data workers read."""

    def __init__(self, fed: _Fed, loader: DataLoader[Any], nominal: int, batch: str) -> None:
        super().__init__(loader, nominal, batch)
        self._fed, self.lookahead = fed, fed.lookahead

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield batches of this worker's samples."""
        set_epoch([self._loader.dataset], this.epoch)
        share = (this.group.size, this.group.rank, self._per_step)
        feed, seed = self._fed.feed(this), mixed(this.seed, this.epoch)
        yield from own_batches(
            this,
            lambda: feed.run_stream(seed, share),
            (),
            self._too_few,
            stops_short=self._loader.drop_last,
        )


def piped(
    loader: Any,
    group: Group,
    batch: str,
    *,
    pad: bool,
    warmup: tuple[DataWarmup, int] | None,
    stages: Sequence[Stage],
) -> Piped | PipedStream:
    """Return the source of a loader whose batches data workers make; UsageError if they cannot."""
    fed = _Fed(loader, stages)
    if not isinstance(loader.dataset, IterableDataset):
        return Piped(fed, loader, group, group.size, batch, pad=pad, warmup=warmup)
    if warmup is not None:
        raise UsageError(
            f"warmup={warmup[0]}: a part of the data is drawn by index, which a stream does not"
            " allow; let the stream itself begin with less"
        )
    return PipedStream(fed, loader, group.size, batch)
