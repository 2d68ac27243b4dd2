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
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, get_worker_info

from paceline.contribution import Announcer
from paceline.data.consensus import group_of
from paceline.data.course import Ranks
from paceline.data.draws import as_then, remembered
from paceline.data.elastic_pass import ElasticPass
from paceline.data.indexed import copied, settings_of
from paceline.data.memory import Memory
from paceline.data.passage import Count, Passage
from paceline.data.reading import ReadingStage, StreamCourse
from paceline.data.samples import named_items
from paceline.data.split import strided_share, weight
from paceline.data.stream import Strided, samples_in
from paceline.errors import DataError, UsageError

Tagged = tuple[int, int, Any]  # samples of a batch, its source, and the batch
_ENDED, _IDLE = -1, -2


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
        self._is_one_shot = isinstance(items, Iterator)
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
            counts = steps.tell(_IDLE if is_idle else _ENDED if batch is None else batch[0])
            if course.version != version:
                if self._key(course.stage(passage.cursor)) != key:
                    return False  # somebody was lost: this batch is cut anew
                version = course.version
            if steps.is_over(counts, self._stops_short):
                return True
            take(passage.cursor, 0 if batch is None else batch[1])
            if batch is None and steps.last is None and self._elastic.pad:
                steps.last = self._spare()
            yield from steps.give(batch, counts)
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


class InStep:
    """Gives out batches of a stream, one global batch after the other."""

    def __init__(
        self,
        elastic: ElasticPass,
        announcer: Announcer,
        passage: Passage,
        course: StreamCourse | Count,
        too_few: str,
    ) -> None:
        self._elastic, self._announcer, self._passage = elastic, announcer, passage
        self._course, self._too_few = course, too_few
        self._group = group_of(elastic.job)
        self._seeds = elastic.seeds
        self.last: Any = None

    def is_guest(self, members: Ranks) -> bool:
        """Say whether the others had the next batch before this worker came, and it has no part."""
        is_behind = self._passage.counts and self._passage.cursor < self._course.taken
        return is_behind and self._elastic.seat not in members

    def nothing(self, spare: Any) -> Any:
        """Return some batch to take part with in such a step; it weighs nothing."""
        self._elastic.ledger.note_take()
        number, self.last = self._passage.cursor, spare
        self._passage.cursor = number + 1
        return self._announced(number, 0.0)

    def tell(self, count: int) -> list[int]:
        """Tell how many samples this worker has, and hear the same from the others.

        One that takes the place of a lost worker in the middle of a step has not been told, but
        knows what all had told before.
        """
        number = self._passage.cursor
        if self._passage.counts and number < self._course.taken and number in self._course.counts:
            return self._course.counts[number]
        counts = self._exchange(count)
        if self._elastic.is_elastic:
            self._course.counts[number] = counts
        return counts

    def _exchange(self, count: int) -> list[int]:
        def exchange() -> list[int]:
            counts = torch.empty(self._group.size, dtype=torch.int64)
            self._group.all_gather(torch.tensor([count]), out=counts)
            return counts.tolist()

        return self._elastic.together(exchange)  # type: ignore[no-any-return]

    def is_over(self, counts: list[int], stops_short: bool) -> bool:
        """Say whether there is no further step."""
        missing = sum(count < 0 for count in counts)
        is_first = self._passage.cursor == 0 and self._elastic.job.elastic.changes == 0
        if is_first and missing and (self._elastic.pad or missing == len(counts)):
            raise DataError(f"pl.shard: {self._named(counts)} no batch at all; {self._too_few}")
        return missing == len(counts) or (stops_short and _ENDED in counts)

    def _named(self, counts: list[int]) -> str:
        ranks = [str(r) for r, count in zip(self._group.ranks, counts, strict=True) if count < 0]
        if len(ranks) == len(counts):
            return "the loader gives"
        return f"the loader gives rank {', '.join(ranks)} of {len(counts)}"

    def give(self, batch: Tagged | None, counts: list[int]) -> Iterator[Any]:
        """Yield this worker's batch of a step, with its weight announced; or its last one."""
        self._elastic.ledger.note_take()
        number = self._passage.cursor
        self._passage.cursor = number + 1
        having = [count for count in counts if count >= 0]
        here = 0 if batch is None else batch[0]
        self._passage.tally.note(number, here, sum(having), len(counts) - len(having))
        if batch is not None:
            self.last = batch[2]
            total = sum(count for count in counts if count > 0)
            yield self._announced(number, weight(batch[0], total, len(counts)))
        elif self._elastic.pad:
            yield self._announced(number, 0.0)

    def run_free(self, batches: Iterator[Tagged], first: int = 0) -> Iterator[Any]:
        """Yield batches, which begin with the `first`, without a word to the others."""
        passage, course = self._passage, self._course
        done = self._elastic.job.elastic.committed_steps if self._elastic.pad else None
        done = (done or 0) if passage.index == 0 else 0
        if passage.is_resumed:
            done = passage.cursor
        for number, (count, source, batch) in enumerate(batches, first):
            passage.cursor = number + 1
            if number < done:
                continue  # this worker's number has done that before
            course.use(number, source)
            passage.tally.note(number, count, count, 0)
            self.last = batch
            yield self._announced(number, 1.0)

    def _announced(self, number: int, weight: float) -> Any:
        if self._seeds is not None:
            self._seeds.before_use(number)
        self._announcer.set(weight)
        return self.last


def presharded(
    elastic: ElasticPass, batches: Iterable[Any], announcer: Announcer, too_few: str
) -> Iterator[Any]:
    """Yield the batches of a worker's own loader, in step with the other workers. One that takes
    over a number, or goes on from a checkpoint, leaves out as many as the others have had."""
    course = Count()
    take = course.take if elastic.is_elastic else course.use
    passage = elastic.open(course)
    things = [batches, getattr(batches, "dataset", None), getattr(batches, "sampler", None)]
    if not passage.is_resumed:
        passage.draws = remembered(things)
    steps = InStep(elastic, announcer, passage, course, too_few)
    is_behind = passage.is_resumed or elastic.job.env.number < elastic.nominal
    try:
        with as_then(passage.draws if passage.is_resumed else None, things):
            own = named_items(batches, "batch", f"rank {elastic.job.env.rank}")
            mine: Iterator[Tagged] = ((samples_in(batch), 0, batch) for batch in own)
            for used in islice(mine, passage.cursor if is_behind and not elastic.is_free else 0):
                steps.last = used[2]
        if elastic.is_free:
            yield from steps.run_free(mine)
            return
        while elastic.job.env.on_loss == "shrink" and steps.is_guest(()):
            first = next(mine, None)
            if first is None and steps.last is None:
                raise DataError("pl.shard: this worker came with no batch at all; " + too_few)
            mine = mine if first is None else chain([first], mine)
            yield steps.nothing(steps.last if first is None else first[2])
        while True:
            batch = next(mine, None)
            counts = steps.tell(_ENDED if batch is None else batch[0])
            if steps.is_over(counts, stops_short=False):
                return
            take(passage.cursor)
            if batch is None and steps.last is None and elastic.pad:
                raise DataError("pl.shard: this worker came with no batch at all; " + too_few)
            yield from steps.give(batch, counts)
    finally:
        elastic.close(passage)
