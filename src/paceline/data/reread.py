"""A pass over a stream, or over other things that yield batches.

Nobody knows how long these are, and workers may have different numbers of samples. So before each
step they tell each other how many they have for it (see stream.py). When the workers of an elastic
job change, and when a run is resumed, the stream is read again from its beginning, without what has
been used, and strided anew; what a worker had read ahead is thrown away. An iterator that can be
used only once keeps what it gave since the last step instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, get_worker_info

from paceline.contribution import Announcer
from paceline.data.draws import as_then, remembered
from paceline.data.elastic_pass import ElasticPass
from paceline.data.in_step import ENDED, IDLE, InStep, Tagged
from paceline.data.indexed import copied, settings_of
from paceline.data.memory import Memory
from paceline.data.passage import Passage
from paceline.data.reading import ReadingStage, StreamCourse
from paceline.data.samples import named_items
from paceline.data.split import strided_share
from paceline.data.stream import Strided, samples_in
from paceline.errors import UsageError


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

    def read(self, stage: ReadingStage, index: int) -> Iterator[Tagged] | None:
        """Return this worker's batches since the stage began; None if there are none for it."""
        loader, workers = self._loader, len(stage.members)
        per_step = self._per_step(workers)
        if strided_share(workers, index, per_step) == 0:
            return None
        copy: Any
        if stage.readings:
            copy = self._copy(stage, index)
        else:  # its processes may outlive the pass
            key = ("stream", workers, index, per_step, *settings_of(loader))
            copy = self._memory.copy_for(key, lambda: self._copy(stage, index))
        copy.generator.manual_seed(self._seed)
        batches: Iterator[Tagged] = iter(copy)
        return batches

    def _copy(self, stage: ReadingStage, index: int) -> Any:
        loader, workers = self._loader, len(stage.members)
        per_step = self._per_step(workers)
        is_batched = loader.batch_size is not None
        changes: dict[str, Any] = {"collate_fn": Tagging(loader.collate_fn, is_batched=is_batched)}
        if is_batched:
            mine = strided_share(workers, index, per_step)
            changes["batch_sampler"] = BatchSampler(loader.sampler, mine, loader.drop_last)
        strided = Strided(loader.dataset, workers, index, per_step, dict(stage.readings))
        return copied(loader, dataset=strided, **changes)

    def forget(self, stage: ReadingStage, batch: int) -> None:
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

    def read(self, stage: ReadingStage, index: int) -> Iterator[Tagged]:
        """Return this worker's items since the stage began."""
        numbering, workers = stage.reading(0).numbering(), len(stage.members)
        for position, item in self._positions():
            number = numbering(position)
            if number is not None and number % workers == index:
                yield samples_in(item), 0, item

    def forget(self, stage: ReadingStage, batch: int) -> None:
        """Let go of what lies before a batch of a stage."""
        needed = stage.reading(0).position((batch - stage.first) * len(stage.members))
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


class Reread:
    """One pass over one stream that all workers read."""

    def __init__(
        self,
        elastic: ElasticPass,
        reader: StreamReader | ItemReader,
        per_step: Callable[[int], int],
        announcer: Announcer,
        *,
        stops_short: bool,
        too_few: str,
    ) -> None:
        self._elastic, self._reader, self._announcer = elastic, reader, announcer
        self._stops_short, self._too_few = stops_short, too_few
        self._course = StreamCourse(per_step, elastic.members, reader.num_sources)
        self._last: Any = None

    def batches(self) -> Iterator[Any]:
        """Yield batches until all workers have run out."""
        elastic = self._elastic
        passage = elastic.open(self._course)
        if not passage.is_resumed:
            passage.draws = remembered(self._reader.things)
        steps = InStep(elastic, self._announcer, passage, self._course, self._too_few)
        try:
            if elastic.is_free:
                stage = self._course.stages[0]
                mine = self._reader.read(stage, elastic.seat)
                yield from steps.run_free(iter(()) if mine is None else mine, stage.first)
                return
            while steps.is_guest(self._course.stage(passage.cursor).members):
                yield steps.nothing(self._spare())
            is_over = False
            while not is_over:
                is_over = yield from self._batches_of_one_stage(passage, steps)
        finally:
            elastic.close(passage)

    def _batches_of_one_stage(self, passage: Passage, steps: InStep) -> Generator[Any, None, bool]:
        """Yield batches until the workers change, or it is over; return which of the two."""
        course, seat = self._course, self._elastic.seat
        stage = course.stage(passage.cursor)
        key, version = self._key(stage), course.version
        take = course.take if self._elastic.is_elastic else course.use
        index = stage.members.index(seat)
        with as_then(passage.draws if passage.is_resumed else None, self._reader.things):
            read = self._reader.read(stage, index)
            is_idle = read is None
            mine: Iterator[Tagged] = iter(()) if read is None else read
            for used in islice(mine, passage.cursor - stage.first):
                steps.last = used[2]
        while True:
            batch = next(mine, None)
            counts = steps.tell(IDLE if is_idle else ENDED if batch is None else batch[0])
            if course.version != version:
                if self._key(course.stage(passage.cursor)) != key:
                    return False  # somebody was lost: this batch is cut anew
                version = course.version
            if steps.is_over(counts, self._stops_short):
                return True
            take(passage.cursor, 0 if batch is None else batch[1])
            if batch is None and steps.last is None and self._elastic.pad:
                steps.last = self._spare()
            if steps.give(batch, counts):
                yield steps.last
            if self._reader.keeps:
                kept = self._elastic.done(passage)
                self._reader.forget(course.stage(kept), kept)
            if course.version != version:
                if self._key(course.stage(passage.cursor)) != key:
                    return False
                version = course.version

    def _key(self, stage: ReadingStage) -> Any:
        return (
            stage.first,
            len(stage.members),
            stage.members.index(self._elastic.seat),
            stage.readings,
        )

    def _spare(self) -> Any:
        """Return some batch to repeat with weight 0, for a worker that never had one."""
        whole = self._reader.read(ReadingStage(0, (self._elastic.seat,), {}), 0)
        found = next(whole, None) if whole is not None else None
        if found is None:
            raise UsageError("pl.shard: this worker came too late to get a batch of this iterator")
        return found[2]
