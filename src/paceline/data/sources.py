"""The four kinds of things that can be shared out, each with its way to make a pass.

Indexed       a DataLoader whose samples have indices: cut by indices, no word needed per step
Stream        a DataLoader over an iterable dataset: striding by samples
Items         anything else that yields batches: striding by batches
Presharded    any of these, when each worker has its own already
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.collectives.group import Group
from paceline.contribution import Announcer
from paceline.data.elastic_pass import ElasticPass
from paceline.data.in_step import presharded
from paceline.data.indexed import IndexedLoader, settings_of
from paceline.data.memory import Memory
from paceline.data.order import mixed
from paceline.data.plan import length_of, plan, samplers_of, warmed_up
from paceline.data.recut import BatchMaker, Recut
from paceline.data.reread import ItemReader, Reread, StreamReader
from paceline.data.split import num_steps
from paceline.data.warmup import DataWarmup
from paceline.errors import DataError, UsageError

_EMPTY_ITERATOR = "; it is a generator or iterator, which can be used once only: pass a new one"


@dataclass(frozen=True)
class Pass:
    """What every pass over the data needs to know."""

    group: Group
    announcer: Announcer
    epoch: int
    seed: int
    lookahead: int  # batches that some worker's loader may ask for ahead of time
    pad: bool
    memory: Memory
    say: Callable[[str], None]  # once for each loader
    entry: ElasticPass  # the pass as the ledger knows it

    @property
    def elastic(self) -> ElasticPass | None:
        """The same, in an elastic job only."""
        return self.entry if self.entry.is_elastic else None


class Source(Protocol):
    """Something that can be shared out. One with `is_noted = True` enters its passes into the
    ledger by itself; of any other the batches are counted as they are handed out."""

    @property
    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks."""

    @property
    def length(self) -> int | None:
        """How many batches this rank gets by itself."""

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield the batches of one pass, each with its weight announced."""


def source_of(
    loader: Any,
    group: Group,
    nominal: int,
    batch: str,
    *,
    pad: bool,
    presharded: bool,
    warmup: tuple[DataWarmup, int] | None = None,
) -> Source:
    """Find out what kind of thing this is; UsageError if it cannot be shared out. `nominal`: the
    number of workers that decides on the size of a global batch; `warmup`: with the epoch."""
    if isinstance(loader, Dataset):
        raise UsageError(
            f"a {type(loader).__name__} is a dataset; pass a DataLoader over it, as for training"
            " in one process, or batch_size=..."
        )
    if not hasattr(loader, "__iter__"):
        raise UsageError(f"expected a DataLoader or an iterable of batches, found {loader!r}")
    if warmup is not None and (presharded or not _has_indices(loader)):
        what = "presharded=True" if presharded else f"a {type(loader).__name__} without indices"
        raise UsageError(
            f"warmup={warmup[0]}: a part of the data is drawn by index, which {what} does not"
            " allow; let the stream itself begin with less"
        )
    if presharded:
        return Presharded(loader)
    if not isinstance(loader, DataLoader):
        if batch == "global":
            raise UsageError(
                f"batch='global' cuts batches, but the batches of a {type(loader).__name__} are"
                " made already; pass a DataLoader, or use batch='worker'"
            )
        return Items(loader, group, pad=pad)
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader, nominal, batch)
    return Indexed(loader, group, nominal, batch, pad=pad, warmup=warmup)


def _has_indices(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


class Indexed:
    """A DataLoader whose samples have indices."""

    is_noted = True

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
        maker = self._maker(this)
        made = Recut(this.entry, maker, self._plan, this.announcer, this.lookahead, this.say)
        yield from made.batches()
        if made.num_batches == 0:
            self._refuse_emptiness()

    def _maker(self, this: Pass) -> BatchMaker:
        """Return what makes batches of indices."""
        # What processes of the loader draw must not depend on how many batches they have made.
        reseeds = self._loader.num_workers > 0 or this.entry.seeds is not None
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

    is_noted = True

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
        per_step = self._rule(this.entry.resize)
        reader = StreamReader(self._loader, per_step, seed, this.memory)
        made = Reread(
            this.entry, reader, per_step, this.announcer, stops_short=drop, too_few=self._too_few
        )
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

    is_noted = True

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
        who = f"rank {this.entry.job.env.rank}"
        reader, one_each = ItemReader(self._items, who), lambda workers: workers
        made = Reread(
            this.entry, reader, one_each, this.announcer, stops_short=False, too_few=too_few
        )
        yield from made.batches()


class Presharded:
    """Whatever yields batches, other ones on each worker."""

    is_noted = True

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.length = length_of(batches)

    @property
    def facts(self) -> dict[str, Any]:
        """Nothing: each worker's data is its own."""
        return {}

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield the batches as they come, in step with the other workers."""
        if isinstance(self._batches, DataLoader):
            set_epoch([*samplers_of(self._batches), self._batches.dataset], this.epoch)
        too_few = "give each worker at least one, or pass pad=False" + _hint(self._batches)
        yield from presharded(this.entry, self._batches, this.announcer, too_few)


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
