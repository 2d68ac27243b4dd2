"""The four kinds of data that pl.shard accepts, and how to make a pass over each.

IndexedSource       a DataLoader whose samples have indices: split by index, no message per step
StreamSource        a DataLoader over an iterable dataset: striding by samples
ItemSource          any other iterable of batches: striding by batches
PreshardedSource    any of these, when each worker has its own data already
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from paceline.comm.group import Group
from paceline.data.data_pass import DataPass
from paceline.data.randomness import mix_seeds
from paceline.data.sources.indexed import BatchMaker, IndexedLoader, IndexedPass, settings_of
from paceline.data.sources.samples import annotate_errors, samples_in
from paceline.data.sources.stream import ItemReader, StreamReader, StridedPass
from paceline.data.sources.synchronized_stream import Tagged, own_batches
from paceline.data.split.plan import DataWarmup, length_of, plan_batches, samplers_of, warmed_up
from paceline.data.split.weights import num_steps
from paceline.errors import DataError, UsageError

_EMPTY_ITERATOR = "; it is a generator or iterator, which can be used once only: pass a new one"


class Source(Protocol):
    """Data that can be divided among workers."""

    kind: str  # in checkpoints

    @property
    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks."""

    @property
    def length(self) -> int | None:
        """How many batches this rank gets."""

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield the batches of one pass, each with its weight announced, and record its
        progress."""


class IndexedSource:
    """A DataLoader whose samples have indices."""

    kind = "indexed"

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
        self._plan = plan_batches(loader, nominal, batch, pad=pad)
        self._units = self._plan.units  # of an epoch over all samples
        if warmup is not None:
            self._plan = warmed_up(self._plan, *warmup, nominal, pad=pad)
        self.length = self._plan.num_steps(group.size, group.rank, pad=pad)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that determine the samples of each batch."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "the length of the sampler": self._units,
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
            "the sampler": type(self._loader.batch_sampler or self._loader.sampler).__name__
            if self._loader.batch_size is None
            else type(self._loader.sampler).__name__,
        }

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield this worker's parts of the global batches."""
        self._before_pass(data_pass)
        group = None if data_pass.is_free_running else data_pass.group
        yield from self._batches_of(
            IndexedPass(data_pass, self._maker(data_pass), self._plan, group)
        )

    def _batches_of(self, made: IndexedPass) -> Iterator[Any]:
        yield from made.batches()
        if made.num_batches == 0:
            self._refuse_emptiness()

    def _maker(self, data_pass: DataPass) -> BatchMaker:
        """Return the maker of batches from indices."""
        # Random numbers of the loader's processes must not depend on how many batches they made.
        reseeds = self._loader.num_workers > 0 or data_pass.script_seeds is not None
        key = ("indexed", reseeds, *settings_of(self._loader))
        return data_pass.record.copy_for(key, lambda: IndexedLoader(self._loader, reseeds=reseeds))

    def _before_pass(self, data_pass: DataPass) -> None:
        """Set the epoch of samplers, and log what is special about this pass."""
        set_epoch(samplers_of(self._loader), data_pass.epoch)
        _log_order(self._loader, data_pass)
        if self._warmup is not None and self._plan.drawn_from is not None:
            data_pass.log_once(
                f"shard: {self._warmup[0]}: {self._plan.units} of {self._units} samples, all of"
                f" them from epoch {self._warmup[0].epochs} on"
            )

    def _refuse_emptiness(self) -> None:
        raise DataError(
            "pl.shard: the loader is empty: its sampler gave no index, or with drop_last=True"
            f" fewer than a global batch of {self._plan.per_step}"
        )


class StreamSource:
    """A DataLoader over an iterable dataset, which all workers read."""

    kind = "stream"

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
        """The settings that determine the size of the batches."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
        }

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield batches of this worker's samples."""
        group = data_pass.group
        if group.size > 1:
            data_pass.log_once(
                f"shard: each of the {group.size} workers reads the whole stream of"
                f" {type(self._loader.dataset).__name__} and keeps one sample in {group.size}; a"
                " dataset that reads only its worker's part (by pl.data_rank()) avoids that, with"
                " pl.shard(..., presharded=True)"
            )
        set_epoch([self._loader.dataset], data_pass.epoch)
        _log_order(self._loader, data_pass)
        # The same on all ranks: a dataset that shuffles in its workers must do it identically.
        seed, drop = mix_seeds(data_pass.seed, data_pass.epoch), self._loader.drop_last
        per_step = self._rule(data_pass.resize)
        reader = StreamReader(self._loader, per_step, seed, data_pass.record)
        made = StridedPass(data_pass, reader, per_step, stops_short=drop, too_few=self._too_few)
        yield from made.batches()

    @property
    def _too_few(self) -> str:
        return (
            f"one global batch is {self._per_step} samples; use fewer workers or a smaller"
            " batch_size, or drop_last=False and pad=False where some may get no batch"
        )

    def _rule(self, resize: str) -> Callable[[int], int]:
        """Return a function from a number of workers to the samples of a step."""
        size, per_step = self._loader.batch_size, self._per_step
        if size is None or (self._batch == "worker" and resize == "worker"):
            return lambda workers: workers * (size or 1)
        return lambda _: per_step


class ItemSource:
    """Any iterable of batches: a list, a generator, another library's loader."""

    kind = "items"

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

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield every world-size-th batch."""
        size = data_pass.group.size
        if size > 1 and not isinstance(self._items, Sequence):
            data_pass.log_once(
                f"shard: each of the {size} workers reads all batches of this"
                f" {type(self._items).__name__} and keeps one in {size}; pass one that makes only"
                " its worker's batches (by pl.data_rank()) and presharded=True to avoid that"
            )
        too_few = f"there must be a batch for each of the {size} workers, or pass pad=False"
        too_few += _hint(self._items)
        reader = ItemReader(self._items, f"rank {data_pass.job.env.rank}")
        made = StridedPass(data_pass, reader, lambda n: n, stops_short=False, too_few=too_few)
        yield from made.batches()


class PreshardedSource:
    """Any iterable of batches, with different batches on each worker."""

    kind = "presharded"

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.length = length_of(batches)

    @property
    def facts(self) -> dict[str, Any]:
        """Nothing: each worker's data is its own."""
        return {}

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield this worker's batches, with as many steps as the other workers."""
        own, where = self._batches, f"rank {data_pass.job.env.rank}"
        if isinstance(own, DataLoader):
            set_epoch([*samplers_of(own), own.dataset], data_pass.epoch)
        too_few = "give each worker at least one, or pass pad=False" + _hint(own)
        owners = [own, getattr(own, "dataset", None), getattr(own, "sampler", None)]

        def read() -> Iterator[Tagged]:
            return ((samples_in(batch), 0, batch) for batch in annotate_errors(own, "batch", where))

        yield from own_batches(
            data_pass, read, owners, too_few, is_free_running=data_pass.is_free_running
        )


def _log_order(loader: DataLoader[Any], data_pass: DataPass) -> None:
    if not loader.in_order:
        data_pass.log_once(
            "shard: batches come in order, although the loader has in_order=False; otherwise the"
            " workers would have parts of different global batches"
        )


def _hint(items: Iterable[Any]) -> str:
    return _EMPTY_ITERATOR if isinstance(items, Iterator) else ""


def set_epoch(objects: Iterable[Any], epoch: int) -> None:
    """Call set_epoch of the objects that have it."""
    for one in {id(one): one for one in objects}.values():
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)
