"""A pass over data that only comes in sequence: a stream, or any iterable of batches.

Its length is not known, and samples have no indices. All workers read the same stream, and each of
w workers takes every w-th sample (or item): STRIDING. Workers may have different numbers of
samples, so they exchange the counts before each step (synchronized_stream.py). When the workers of
an elastic job change, and when a run is resumed, the stream is read again from its beginning,
without the used positions, and strided again. Samples that a worker had prefetched are dropped. An
iterator that can be used only once keeps what it yielded since the last step instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from paceline.data.cursor.cursor import BatchRange
from paceline.data.cursor.positions import StreamCursor, UnreadPositions, unread_in
from paceline.data.data_pass import DataPass
from paceline.data.randomness import save_random_state, with_random_state
from paceline.data.sources.indexed import copied, settings_of
from paceline.data.sources.loaders import LoaderRecord
from paceline.data.sources.samples import DatasetWrapper, annotate_errors, samples_in
from paceline.data.sources.synchronized_stream import ENDED, IDLE, SynchronizedSteps, Tagged
from paceline.data.split.weights import stride, strided_share
from paceline.errors import UsageError


class StridedDataset(DatasetWrapper, IterableDataset[Any]):
    """A stream reduced to this worker's samples."""

    def __init__(
        self,
        dataset: Any,
        world_size: int,
        rank: int,
        per_step: int,
        unread: Mapping[int, UnreadPositions] | None = None,  # by process of the loader
    ) -> None:
        super().__init__(dataset, world_size, rank, per_step, unread)

    def __iter__(self) -> Iterator[Any]:
        dataset, *numbers, unread = self._wrapped
        is_mine, where = stride(*numbers), f"worker {numbers[1]} of {numbers[0]}"
        samples = annotate_errors(dataset, "sample", where)
        if not unread:
            return (sample for position, sample in enumerate(samples) if is_mine(position))
        info = get_worker_info()
        number_of = unread.get(0 if info is None else info.id, UnreadPositions()).numbering()
        numbered = ((number_of(position), sample) for position, sample in enumerate(samples))
        return (sample for number, sample in numbered if number is not None and is_mine(number))


class TaggingCollate:
    """A collate function that also returns the number of samples and the process."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate, self._is_batched = collate, is_batched

    def __call__(self, samples: Any) -> Tagged:
        batch = self._collate(samples)
        info = get_worker_info()
        count = len(samples) if self._is_batched else samples_in(batch)
        return count, 0 if info is None else info.id, batch


class StreamReader:
    """Reads what remains of a loader's stream, for one worker of a batch range."""

    def __init__(
        self,
        loader: DataLoader[Any],
        per_step: Callable[[int], int],
        seed: int,
        record: LoaderRecord,
    ) -> None:
        self._loader, self._per_step, self._seed = loader, per_step, seed
        self._record = record
        self.num_sources = max(1, loader.num_workers)
        self.keeps = False  # items that it has yielded
        self.owners = [loader, loader.dataset]

    def read(self, batch_range: BatchRange, index: int) -> Iterator[Tagged] | None:
        """Return this worker's batches since the range began; None if there are none for it."""
        loader, workers = self._loader, len(batch_range.members)
        per_step = self._per_step(workers)
        if strided_share(workers, index, per_step) == 0:
            return None
        copy: Any
        if batch_range.remaining:
            copy = self._copy(batch_range, index)
        else:  # the copy's processes may outlive the pass
            key = ("stream", workers, index, per_step, *settings_of(loader))
            copy = self._record.copy_for(key, lambda: self._copy(batch_range, index))
        copy.generator.manual_seed(self._seed)
        batches: Iterator[Tagged] = iter(copy)
        return batches

    def _copy(self, batch_range: BatchRange, index: int) -> Any:
        loader, workers = self._loader, len(batch_range.members)
        per_step = self._per_step(workers)
        is_batched = loader.batch_size is not None
        changes: dict[str, Any] = {
            "collate_fn": TaggingCollate(loader.collate_fn, is_batched=is_batched)
        }
        if is_batched:
            mine = strided_share(workers, index, per_step)
            changes["batch_sampler"] = BatchSampler(loader.sampler, mine, loader.drop_last)
        strided = StridedDataset(
            loader.dataset, workers, index, per_step, dict(batch_range.remaining)
        )
        return copied(loader, dataset=strided, **changes)

    def forget(self, batch_range: BatchRange, batch: int) -> None:
        """Do nothing: nothing is kept."""


class ItemReader:
    """Reads what remains of an iterable of batches; each of w workers gets every w-th."""

    def __init__(self, items: Iterable[Any], where: str = "this rank") -> None:
        self._items, self._where = items, where
        self.num_sources = 1
        self.owners = [items]
        self.keeps = self._is_one_shot = isinstance(items, Iterator)
        self._kept: deque[Any] = deque()
        self._start = 0  # position of the first kept item

    def read(self, batch_range: BatchRange, index: int) -> Iterator[Tagged]:
        """Yield this worker's items since the range began."""
        numbering, workers = unread_in(batch_range, 0).numbering(), len(batch_range.members)
        for position, item in self._positions():
            number = numbering(position)
            if number is not None and number % workers == index:
                yield samples_in(item), 0, item

    def forget(self, batch_range: BatchRange, batch: int) -> None:
        """Drop the items before a batch of a range."""
        needed = unread_in(batch_range, 0).position(
            (batch - batch_range.first) * len(batch_range.members)
        )
        while self._kept and self._start < needed:
            self._kept.popleft()
            self._start += 1

    def _positions(self) -> Iterator[tuple[int, Any]]:
        items = annotate_errors(self._items, "batch", self._where)
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
        data_pass: DataPass,
        reader: StreamReader | ItemReader,
        per_step: Callable[[int], int],
        *,
        stops_short: bool,
        too_few: str,
    ) -> None:
        self._pass, self._reader, self._stops_short = data_pass, reader, stops_short
        self._cursor = StreamCursor(per_step, data_pass.members, reader.num_sources)
        self._steps = SynchronizedSteps(data_pass, self._cursor, too_few)

    def batches(self) -> Iterator[Any]:
        """Yield batches until all workers have run out."""
        data_pass, cursor, steps = self._pass, self._cursor, self._steps
        data_pass.open(cursor)
        if not cursor.is_resumed:
            cursor.draws = save_random_state(self._reader.owners)
        try:
            if data_pass.is_free_running:
                batch_range = cursor.ranges[0]
                mine = self._reader.read(batch_range, data_pass.member)
                yield from steps.run_free(iter(()) if mine is None else mine, batch_range.first)
                return
            while steps.is_guest(cursor.range_of(cursor.position).members):
                yield steps.guest_batch(self._spare())
            is_over = False
            while not is_over:
                is_over = yield from self._batches_of_one_range()
        finally:
            data_pass.close(cursor)

    def _batches_of_one_range(self) -> Generator[Any, None, bool]:
        """Yield batches until the workers change or the pass is over; return whether it is over."""
        data_pass, cursor, steps = self._pass, self._cursor, self._steps
        batch_range = cursor.range_of(cursor.position)
        key, version = self._key(batch_range), cursor.version
        take = cursor.take if data_pass.is_elastic else cursor.use
        with with_random_state(cursor.draws if cursor.is_resumed else None, self._reader.owners):
            read = self._reader.read(batch_range, batch_range.members.index(data_pass.member))
            is_idle = read is None
            mine: Iterator[Tagged] = iter(()) if read is None else read
            for used in islice(mine, cursor.position - batch_range.first):
                steps.last = used[2]
        while True:
            batch = next(mine, None)
            counts = steps.exchange_counts(
                IDLE if is_idle else ENDED if batch is None else batch[0]
            )
            if cursor.version != version:
                if self._key(cursor.range_of(cursor.position)) != key:
                    return False  # a worker was lost: this batch is split again
                version = cursor.version
            if steps.is_over(counts, self._stops_short):
                return True
            take(cursor.position, 0 if batch is None else batch[1])
            if batch is None and steps.last is None and data_pass.pad:
                steps.last = self._spare()
            if steps.prepare_batch(batch, counts):
                yield steps.last
            if self._reader.keeps:
                kept = data_pass.num_done(cursor)
                self._reader.forget(cursor.range_of(kept), kept)
            if cursor.version != version:
                if self._key(cursor.range_of(cursor.position)) != key:
                    return False
                version = cursor.version

    def _key(self, batch_range: BatchRange) -> Any:
        return (
            batch_range.first,
            len(batch_range.members),
            batch_range.members.index(self._pass.member),
            batch_range.remaining,
        )

    def _spare(self) -> Any:
        """Return a batch to repeat with weight 0, for a worker that never had one."""
        whole = self._reader.read(BatchRange(0, (self._pass.member,), {}), 0)
        found = next(whole, None) if whole is not None else None
        if found is None:
            raise UsageError(
                "pl.shard: this worker joined too late to get a batch of this iterator; pass a"
                " loader that can be iterated again"
            )
        return found[2]
