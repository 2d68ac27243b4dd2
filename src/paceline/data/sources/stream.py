"""A pass over a stream, or over other things that yield batches: data that only comes in sequence.

Nobody knows its length, and nobody can ask for sample 17. Of one stream that all workers read, each
takes every world-size-th sample (or item): STRIDING. Workers may have different numbers of samples,
so before each step they tell each other how many they have for it (synchronized_stream.py). When
the workers of an elastic job change, and when a run is resumed, the stream is read again from its
beginning, without what has been used, and strided anew; what a worker had read ahead is thrown
away. An iterator that can be used only once keeps what it gave since the last step instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from paceline.data.cursor.cursor import Stage
from paceline.data.cursor.passes import Pass
from paceline.data.cursor.positions import Reading, StreamCursor, reading_of
from paceline.data.randomness import as_then, remembered
from paceline.data.sources.indexed import copied, settings_of
from paceline.data.sources.loaders import Memory
from paceline.data.sources.samples import named_items, samples_in
from paceline.data.sources.synchronized_stream import ENDED, IDLE, InStep, Tagged
from paceline.data.split.weights import stride, strided_share
from paceline.errors import UsageError


class Strided(IterableDataset[Any]):
    """A stream of which only this worker's samples are left. Everything else is the dataset's own:
    a worker_init_fn that sets attributes of `get_worker_info().dataset` reaches the dataset."""

    def __init__(
        self,
        dataset: Any,
        world_size: int,
        rank: int,
        per_step: int,
        readings: Mapping[int, Reading] | None = None,  # by process of the loader: what is left
    ) -> None:
        object.__setattr__(self, "_strided", (dataset, world_size, rank, per_step, readings))

    def __iter__(self) -> Iterator[Any]:
        dataset, *numbers, readings = self._strided
        is_mine, who = stride(*numbers), f"worker {numbers[1]} of {numbers[0]}"
        samples = named_items(dataset, "sample", who)
        if not readings:
            return (sample for position, sample in enumerate(samples) if is_mine(position))
        info = get_worker_info()
        number_of = readings.get(0 if info is None else info.id, Reading()).numbering()
        numbered = ((number_of(position), sample) for position, sample in enumerate(samples))
        return (sample for number, sample in numbered if number is not None and is_mine(number))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_strided")[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._strided[0], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Strided, self._strided


class Tagging:
    """A collate function that also says how many samples it was given, and in which process."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate, self._is_batched = collate, is_batched

    def __call__(self, samples: Any) -> Tagged:
        batch = self._collate(samples)
        info = get_worker_info()
        count = len(samples) if self._is_batched else samples_in(batch)
        return count, 0 if info is None else info.id, batch


class StreamReader:
    """Reads what is left of a loader's stream, for one worker of a stage."""

    def __init__(
        self,
        loader: DataLoader[Any],
        per_step: Callable[[int], int],
        seed: int,
        memory: Memory,
    ) -> None:
        self._loader, self._per_step, self._seed = loader, per_step, seed
        self._memory = memory
        self.num_sources = max(1, loader.num_workers)
        self.keeps = False  # what it gave
        self.things = [loader, loader.dataset]

    def read(self, stage: Stage, index: int) -> Iterator[Tagged] | None:
        """Return this worker's batches since the stage began; None if there are none for it."""
        loader, workers = self._loader, len(stage.members)
        per_step = self._per_step(workers)
        if strided_share(workers, index, per_step) == 0:
            return None
        copy: Any
        if stage.left:
            copy = self._copy(stage, index)
        else:  # its processes may outlive the pass
            key = ("stream", workers, index, per_step, *settings_of(loader))
            copy = self._memory.copy_for(key, lambda: self._copy(stage, index))
        copy.generator.manual_seed(self._seed)
        batches: Iterator[Tagged] = iter(copy)
        return batches

    def _copy(self, stage: Stage, index: int) -> Any:
        loader, workers = self._loader, len(stage.members)
        per_step = self._per_step(workers)
        is_batched = loader.batch_size is not None
        changes: dict[str, Any] = {"collate_fn": Tagging(loader.collate_fn, is_batched=is_batched)}
        if is_batched:
            mine = strided_share(workers, index, per_step)
            changes["batch_sampler"] = BatchSampler(loader.sampler, mine, loader.drop_last)
        strided = Strided(loader.dataset, workers, index, per_step, dict(stage.left))
        return copied(loader, dataset=strided, **changes)

    def forget(self, stage: Stage, batch: int) -> None:
        """Nothing is kept."""


class ItemReader:
    """Reads what is left of an iterable of batches, every w-th of w workers."""

    def __init__(self, items: Iterable[Any], who: str = "this rank") -> None:
        self._items, self._who = items, who
        self.num_sources = 1
        self.things = [items]
        self.keeps = self._is_one_shot = isinstance(items, Iterator)
        self._kept: deque[Any] = deque()
        self._start = 0  # position of the first one that is kept

    def read(self, stage: Stage, index: int) -> Iterator[Tagged]:
        """Return this worker's items since the stage began."""
        numbering, workers = reading_of(stage, 0).numbering(), len(stage.members)
        for position, item in self._positions():
            number = numbering(position)
            if number is not None and number % workers == index:
                yield samples_in(item), 0, item

    def forget(self, stage: Stage, batch: int) -> None:
        """Let go of what lies before a batch of a stage."""
        needed = reading_of(stage, 0).position((batch - stage.first) * len(stage.members))
        while self._kept and self._start < needed:
            self._kept.popleft()
            self._start += 1

    def _positions(self) -> Iterator[tuple[int, Any]]:
        items = named_items(self._items, "batch", self._who)
        if not self._is_one_shot:
            yield from enumerate(items)
            return
        yield from enumerate(list(self._kept), self._start)
        for item in items:
            self._kept.append(item)
            yield self._start + len(self._kept) - 1, item


class StridedPass:
    """One pass over one stream that all workers read."""

    def __init__(
        self,
        this: Pass,
        reader: StreamReader | ItemReader,
        per_step: Callable[[int], int],
        *,
        stops_short: bool,
        too_few: str,
    ) -> None:
        self._this, self._reader, self._stops_short = this, reader, stops_short
        self._cursor = StreamCursor(per_step, this.members, reader.num_sources)
        self._steps = InStep(this, self._cursor, too_few)

    def batches(self) -> Iterator[Any]:
        """Yield batches until all workers have run out."""
        this, cursor, steps = self._this, self._cursor, self._steps
        this.open(cursor)
        if not cursor.is_resumed:
            cursor.draws = remembered(self._reader.things)
        try:
            if this.is_free:
                stage = cursor.stages[0]
                mine = self._reader.read(stage, this.seat)
                yield from steps.run_free(iter(()) if mine is None else mine, stage.first)
                return
            while steps.is_guest(cursor.stage(cursor.position).members):
                yield steps.nothing(self._spare())
            is_over = False
            while not is_over:
                is_over = yield from self._batches_of_one_stage()
        finally:
            this.close(cursor)

    def _batches_of_one_stage(self) -> Generator[Any, None, bool]:
        """Yield batches until the workers change, or it is over; return which of the two."""
        this, cursor, steps = self._this, self._cursor, self._steps
        stage = cursor.stage(cursor.position)
        key, version = self._key(stage), cursor.version
        take = cursor.take if this.is_elastic else cursor.use
        with as_then(cursor.draws if cursor.is_resumed else None, self._reader.things):
            read = self._reader.read(stage, stage.members.index(this.seat))
            is_idle = read is None
            mine: Iterator[Tagged] = iter(()) if read is None else read
            for used in islice(mine, cursor.position - stage.first):
                steps.last = used[2]
        while True:
            batch = next(mine, None)
            counts = steps.tell(IDLE if is_idle else ENDED if batch is None else batch[0])
            if cursor.version != version:
                if self._key(cursor.stage(cursor.position)) != key:
                    return False  # somebody was lost: this batch is cut anew
                version = cursor.version
            if steps.is_over(counts, self._stops_short):
                return True
            take(cursor.position, 0 if batch is None else batch[1])
            if batch is None and steps.last is None and this.pad:
                steps.last = self._spare()
            if steps.give(batch, counts):
                yield steps.last
            if self._reader.keeps:
                kept = this.done(cursor)
                self._reader.forget(cursor.stage(kept), kept)
            if cursor.version != version:
                if self._key(cursor.stage(cursor.position)) != key:
                    return False
                version = cursor.version

    def _key(self, stage: Stage) -> Any:
        return stage.first, len(stage.members), stage.members.index(self._this.seat), stage.left

    def _spare(self) -> Any:
        """Return some batch to repeat with weight 0, for a worker that never had one."""
        whole = self._reader.read(Stage(0, (self._this.seat,), {}), 0)
        found = next(whole, None) if whole is not None else None
        if found is None:
            raise UsageError("pl.shard: this worker came too late to get a batch of this iterator")
        return found[2]
