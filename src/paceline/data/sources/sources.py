"""The four kinds of things that can be shared out, each with its way to make a pass.

Indexed       a DataLoader whose samples have indices: cut by indices, no word needed per step
Stream        a DataLoader over an iterable dataset: striding by samples
Items         anything else that yields batches: striding by batches
Presharded    any of these, when each worker has its own already
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from paceline.comm.group import Group
from paceline.data.cursor.passes import Pass
from paceline.data.randomness import mixed
from paceline.data.sources.indexed import BatchMaker, IndexedLoader, IndexedPass, settings_of
from paceline.data.sources.samples import named_items, samples_in
from paceline.data.sources.stream import ItemReader, StreamReader, StridedPass
from paceline.data.sources.synchronized_stream import own_batches
from paceline.data.split.plan import DataWarmup, length_of, plan, samplers_of, warmed_up
from paceline.data.split.weights import num_steps
from paceline.errors import DataError, UsageError

_EMPTY_ITERATOR = "; it is a generator or iterator, which can be used once only: pass a new one"


class Source(Protocol):
    """Something that can be shared out."""

    @property
    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks."""

    @property
    def length(self) -> int | None:
        """How many batches this rank gets by itself."""

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield the batches of one pass, each with its weight announced, and enter it into the
        ledger."""


class Indexed:
    """A DataLoader whose samples have indices."""

    def __init__(
        self,
        loader: DataLoader[Any],
        group: Group,
        nominal: int,
        batch: str,
        *,
        pad: bool,
        warmup: tuple[DataWarmup, int] | None = None,
    ) -> None:
        self._loader, self._warmup = loader, warmup
        self._plan = plan(loader, nominal, batch, pad=pad)
        self._units = self._plan.units  # of an epoch over all data
        if warmup is not None:
            self._plan = warmed_up(self._plan, *warmup, nominal, pad=pad)
        self.length = self._plan.num_steps(group.size, group.rank, pad=pad)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that decide on which samples make which batch."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "the length of the sampler": self._units,
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
            "the sampler": type(self._loader.batch_sampler or self._loader.sampler).__name__
            if self._loader.batch_size is None
            else type(self._loader.sampler).__name__,
        }

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield this worker's parts of the global batches."""
        self._before_pass(this)
        group = None if this.is_free else this.group
        yield from self._batches_of(IndexedPass(this, self._maker(this), self._plan, group))

    def _batches_of(self, made: IndexedPass) -> Iterator[Any]:
        yield from made.batches()
        if made.num_batches == 0:
            self._refuse_emptiness()

    def _maker(self, this: Pass) -> BatchMaker:
        """Return what makes batches of indices."""
        # What processes of the loader draw must not depend on how many batches they have made.
        reseeds = self._loader.num_workers > 0 or this.seeds is not None
        key = ("indexed", reseeds, *settings_of(self._loader))
        return this.memory.copy_for(key, lambda: IndexedLoader(self._loader, reseeds=reseeds))

    def _before_pass(self, this: Pass) -> None:
        """Let samplers know the epoch, and the person what is special about it."""
        set_epoch(samplers_of(self._loader), this.epoch)
        _mention_order(self._loader, this)
        if self._warmup is not None and self._plan.drawn_from is not None:
            this.say(
                f"shard: {self._warmup[0]}: {self._plan.units} of {self._units} samples, all of"
                f" them from epoch {self._warmup[0].epochs} on"
            )

    def _refuse_emptiness(self) -> None:
        raise DataError(
            "pl.shard: the loader is empty: its sampler gave no index, or with drop_last=True"
            f" fewer than a global batch of {self._plan.per_step}"
        )


class Stream:
    """A DataLoader over an iterable dataset, which all workers read."""

    def __init__(self, loader: DataLoader[Any], nominal: int, batch: str) -> None:
        self._loader, self._batch = loader, batch
        size = loader.batch_size
        if batch == "global" and (size is None or size < nominal):
            raise UsageError(
                f"batch='global' needs a batch_size of at least the number of workers,"
                f" {nominal}; the loader has batch_size={size}"
            )
        self._per_step = nominal * (size or 1) if batch == "worker" else size or 1
        samples = length_of(loader.dataset)
        self.length = samples
        if samples is not None:
            self.length = num_steps(samples, self._per_step, drop_short=loader.drop_last)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides on the size of the batches."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
        }

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield batches of this worker's samples."""
        group = this.group
        if group.size > 1:
            this.say(
                f"shard: each of the {group.size} workers reads the whole stream of"
                f" {type(self._loader.dataset).__name__} and keeps one sample in {group.size}; a"
                " dataset that reads only its worker's part (by pl.data_rank()) avoids that, with"
                " pl.shard(..., presharded=True)"
            )
        set_epoch([self._loader.dataset], this.epoch)
        _mention_order(self._loader, this)
        # Equal on all ranks: a dataset that shuffles in its workers must do so alike everywhere.
        seed, drop = mixed(this.seed, this.epoch), self._loader.drop_last
        per_step = self._rule(this.resize)
        reader = StreamReader(self._loader, per_step, seed, this.memory)
        made = StridedPass(this, reader, per_step, stops_short=drop, too_few=self._too_few)
        yield from made.batches()

    @property
    def _too_few(self) -> str:
        return (
            f"one global batch is {self._per_step} samples; use fewer workers or a smaller"
            " batch_size, or drop_last=False and pad=False where some may get no batch"
        )

    def _rule(self, resize: str) -> Callable[[int], int]:
        """Return how many samples make a step of so many workers."""
        size, per_step = self._loader.batch_size, self._per_step
        if size is None or (self._batch == "worker" and resize == "worker"):
            return lambda workers: workers * (size or 1)
        return lambda _: per_step


class Items:
    """Something that yields batches: a list, a generator, another library's loader."""

    def __init__(self, items: Iterable[Any], group: Group, *, pad: bool) -> None:
        self._items = items
        count = length_of(items)
        self.length = None
        if count is not None:
            mine = -(-(count - group.rank) // group.size)
            self.length = -(-count // group.size) if pad else mine

    @property
    def facts(self) -> dict[str, Any]:
        """The number of batches, if it is known."""
        return {"the number of batches": length_of(self._items)}

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield every world-size-th batch."""
        size = this.group.size
        if size > 1 and not isinstance(self._items, Sequence):
            this.say(
                f"shard: each of the {size} workers reads all batches of this"
                f" {type(self._items).__name__} and keeps one in {size}; pass one that makes only"
                " its worker's batches (by pl.data_rank()) and presharded=True to avoid that"
            )
        too_few = f"there must be a batch for each of the {size} workers, or pass pad=False"
        too_few += _hint(self._items)
        reader = ItemReader(self._items, f"rank {this.job.env.rank}")
        made = StridedPass(this, reader, lambda n: n, stops_short=False, too_few=too_few)
        yield from made.batches()


class Presharded:
    """Whatever yields batches, other ones on each worker."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.length = length_of(batches)

    @property
    def facts(self) -> dict[str, Any]:
        """Nothing: each worker's data is its own."""
        return {}

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield the batches as they come, in step with the other workers."""
        own, who = self._batches, f"rank {this.job.env.rank}"
        if isinstance(own, DataLoader):
            set_epoch([*samplers_of(own), own.dataset], this.epoch)
        too_few = "give each worker at least one, or pass pad=False" + _hint(own)
        things = [own, getattr(own, "dataset", None), getattr(own, "sampler", None)]

        def read() -> Iterator[tuple[int, Any]]:
            return ((samples_in(batch), batch) for batch in named_items(own, "batch", who))

        yield from own_batches(this, read, things, too_few, is_free=this.is_free)


def _mention_order(loader: DataLoader[Any], this: Pass) -> None:
    if not loader.in_order:
        this.say(
            "shard: batches come in order, although the loader has in_order=False; the workers"
            " would else have parts of different global batches"
        )


def _hint(items: Iterable[Any]) -> str:
    return _EMPTY_ITERATOR if isinstance(items, Iterator) else ""


def set_epoch(things: Iterable[Any], epoch: int) -> None:
    """Let things that want it know the epoch."""
    for thing in {id(thing): thing for thing in things}.values():
        if hasattr(thing, "set_epoch"):
            thing.set_epoch(epoch)
