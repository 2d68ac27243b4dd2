"""A loader whose batches data workers make. On a trainer it is the source of passes; on a data
worker it is the point at which the script stops and the service begins.

Loaders are counted as the script passes them to `pl.shard(..., mode="pipeline")`. Trainers and data
workers run the same script, so the n-th is the same loader everywhere; requests verify that. A data
worker serves all loaders that it has when the script first iterates one of them.

In a pass a bounded number of requests is under way: `lookahead`, and the one that is needed next.
Each batch that is handed out makes room for one more, so data workers are never further ahead.
Batches are handed out in the order of the epoch, in whatever order they arrive.

The tensors of a batch lie in memory of the data worker, which does not reuse it until the last of
them is freed here. A script that keeps many batches gets copies, so that this memory stays bounded.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from paceline import _core
from paceline.comm.group import Group
from paceline.data.data_pass import DataPass
from paceline.data.randomness import mix_seeds, preserve_random_state
from paceline.data.sources.pinning import can_pin_batches
from paceline.data.sources.sources import IndexedSource, StreamSource, set_epoch
from paceline.data.sources.synchronized_stream import Tagged, own_batches
from paceline.data.split.order import to_plain_index
from paceline.data.split.plan import DataWarmup, plan_batches
from paceline.data.workers import messages as m
from paceline.data.workers.messages import unpack
from paceline.data.workers.recipe import Recipe, SampleFailed, Stage, StreamEnded
from paceline.data.workers.service import log_serving, serve, stage_members
from paceline.data.workers.worker_pool import DataWorkerPool, PendingBatch, ReceivedReply
from paceline.errors import DataError, UsageError
from paceline.runtime.console import say
from paceline.runtime.job import Job, current

_AHEAD = 2  # batches for each data worker, unless the loader has a prefetch_factor
_HELD = 4  # batches of one data worker that the script may hold, besides the lookahead


@dataclass
class _Pipeline:
    """What this process knows of the data workers of one job."""

    numbers: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)  # by loader
    recipes: list[Recipe] = field(default_factory=list)  # by number, on a data worker
    unknown: set[int] = field(default_factory=set)  # numbers that data workers do not know
    pool: DataWorkerPool | None = None
    _counted: int = 0

    def number_of(self, loader: Any) -> int:
        """Return the number of a loader; a new one if it comes for the first time."""
        if loader not in self.numbers:
            self.numbers[loader] = self._counted
            self._counted += 1
        return self.numbers[loader]


_by_job: WeakKeyDictionary[Job, _Pipeline] = WeakKeyDictionary()


def _pipeline_of(job: Job) -> _Pipeline:
    return _by_job.setdefault(job, _Pipeline())


def _pool_of(job: Job) -> DataWorkerPool | None:
    pipeline = _pipeline_of(job)
    if pipeline.pool is None and job.env.data_workers:
        _core.keep_freed_memory()  # batches from other hosts arrive in new memory
        last = len(job.env.data_workers) - 1
        agent, members = job.rendezvous.agent, stage_members(job, last)
        pipeline.pool = DataWorkerPool(job.fabric, agent, members, is_first_stage=last == 0)
    return pipeline.pool


def require_loader(loader: Any, stages: Sequence[Stage]) -> None:
    """Raise UsageError unless data workers can make the batches of a loader."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"mode='pipeline' needs a DataLoader, found a {type(loader).__name__}: data workers"
            " make batches from its dataset; use mode='shard' for an iterable of batches"
        )
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(loader), name) is not getattr(DataLoader, name):
            raise UsageError(
                f"mode='pipeline': {type(loader).__name__} overrides {name}, which data workers do"
                " not call; do that in the dataset or in collate_fn, or use mode='shard'"
            )
    for stage in stages:
        if not callable(stage):
            raise UsageError(f"stages={stages!r:.80}: expected functions of a sample")


# -- on a data worker -----------------------------------------------------------------------------


def register_loader(
    loader: Any, stages: Sequence[Stage], batch: str, *, pad: bool, is_pipeline: bool
) -> ServedLoader:
    """Return what pl.shard returns on a data worker, and register the loader to be served."""
    if is_pipeline:
        require_loader(loader, stages)
        pipeline = _pipeline_of(current())
        number = pipeline.number_of(loader)
        pipeline.recipes[number:] = [Recipe(loader, stages), *pipeline.recipes[number + 1 :]]
    return ServedLoader(loader, batch, pad=pad, is_pipeline=is_pipeline)


class ServedLoader:
    """What `pl.shard` returns on a data worker. Iterating it serves all loaders, and does not
    return. A loader of another mode yields no batches here."""

    def __init__(self, loader: Any, batch: str, *, pad: bool, is_pipeline: bool) -> None:
        self._loader, self._batch = loader, batch
        self._pad, self._is_pipeline = pad, is_pipeline

    def __iter__(self) -> Iterator[Any]:
        if self._is_pipeline:
            job = current()
            recipes = _pipeline_of(job).recipes
            log_serving(job, recipes)
            serve(job, recipes)
        return iter(())

    def __len__(self) -> int:
        """Return the number of batches of rank 0, from which scripts compute schedules."""
        if not self._is_pipeline:
            return len(self._loader)
        workers = current().env.world_size
        if isinstance(self._loader.dataset, IterableDataset):
            length = StreamSource(self._loader, workers, self._batch).length
        else:
            made = plan_batches(self._loader, workers, self._batch, pad=self._pad)
            length = made.num_steps(workers, 0, pad=self._pad)
        if length is None:
            raise TypeError("the number of batches of this loader is not known")
        return length


# -- on a trainer ---------------------------------------------------------------------------------


class _PipelineLoader:
    """A loader on a trainer: its number, and how its batches are made."""

    def __init__(self, loader: DataLoader[Any], stages: Sequence[Stage]) -> None:
        require_loader(loader, stages)
        job = current()
        if job.elastic.is_on:
            raise UsageError(
                "mode='pipeline' in an elastic job: data workers cannot follow changes of the"
                " workers; use mode='shard' (and num_workers of the DataLoader), or a job without"
                " --min, --max and --on-loss"
            )
        pipeline = _pipeline_of(job)
        self.number, self.recipe = pipeline.number_of(loader), Recipe(loader, stages)
        self._unknown = pipeline.unknown
        self.pins_memory = loader.pin_memory and can_pin_batches()
        per_worker = loader.prefetch_factor or _AHEAD
        self.lookahead = per_worker * max(1, sum(job.env.data_workers))

    @property
    def is_unknown(self) -> bool:
        """Whether data workers do not have this loader."""
        return self.number in self._unknown

    def mark_unknown(self) -> None:
        """Note that data workers do not have this loader; log it once."""
        if not self.is_unknown:
            self._unknown.add(self.number)
            say(
                f"rank {current().env.rank}: the data workers do not know loader {self.number}"
                f" ({self.recipe.facts}): its batches are MADE HERE; call pl.shard for all loaders"
                " before the first loop over one of them"
            )

    def fetch(self, data_pass: DataPass) -> BatchFetcher:
        """Begin a pass."""
        pool = _pool_of(current())
        if pool is None:
            data_pass.log_once(
                "shard: mode='pipeline' without data workers: each worker makes its batches itself"
                " (paceline run --data-workers 2)"
            )
        elif self.pins_memory:
            pool.pins_memory = True
        return BatchFetcher(self, pool, data_pass.epoch)


class BatchFetcher:
    """Requests the batches of one pass from data workers, and hands them out in order."""

    reseeds = True

    def __init__(self, loader: _PipelineLoader, pool: DataWorkerPool | None, epoch: int) -> None:
        self._loader, self._pool, self._epoch = loader, pool, epoch

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:  # noqa: ARG002
        """Return an iterator over the batches of these parts, each with a seed of its own."""
        return self._fetch(
            self._request(seed, indices=to_plain_index(part)) for seed, part in parts
        )

    def run_stream(self, seed: int, share: tuple[int, int, int]) -> Iterator[Tagged]:
        """Yield the batches of a pass over a stream, with the number of samples in each."""
        requests = (self._request(seed, stream=share, place=i) for i in itertools.count())
        try:
            for count, batch in self._fetch(requests):
                yield count, 0, batch
        except StreamEnded:
            return

    def _fetch(self, requests: Iterator[m.BatchRequest]) -> Iterator[Any]:
        under_way = deque[PendingBatch | m.BatchRequest]()
        try:
            while True:
                # All ranks are equally far ahead: they prepare the order of samples together.
                ahead = self._loader.lookahead + 1 - len(under_way)
                for request in itertools.islice(requests, ahead):
                    under_way.append(self._send(request))
                if not under_way:
                    return
                batch = self._receive(under_way.popleft())
                yield pin_memory(batch) if self._loader.pins_memory else batch
        finally:
            for unused in under_way:
                if isinstance(unused, PendingBatch) and self._pool is not None:
                    self._pool.abandon(unused)

    def _request(self, seed: int, **what: Any) -> m.BatchRequest:
        number, facts = self._loader.number, self._loader.recipe.facts
        return m.BatchRequest(0, number, facts, self._epoch, seed, **what)

    def _send(self, request: m.BatchRequest) -> PendingBatch | m.BatchRequest:
        if self._pool is None or self._pool.is_empty or self._loader.is_unknown:
            return request
        return self._pool.send(request)

    def _receive(self, request: PendingBatch | m.BatchRequest) -> Any:
        """Wait for a batch, or make it here."""
        if not isinstance(request, PendingBatch):
            return self._make_here(request)
        assert self._pool is not None, "the request was sent"
        received = self._pool.wait(request)
        if received is not None and received.reply.problem == m.UNKNOWN:
            self._loader.mark_unknown()
            received = None
        return self._make_here(request.request) if received is None else self._unpack(received)

    def _make_here(self, request: m.BatchRequest) -> Any:
        try:
            with preserve_random_state():
                return self._loader.recipe.make(request)
        except SampleFailed as failure:
            raise DataError(f"rank {current().env.rank}: {failure}") from failure.__cause__

    def _unpack(self, received: ReceivedReply) -> Any:
        reply, connection, memory = received.reply, received.connection, received.memory
        if reply.problem == m.RAISED:
            raise DataError(f"rank {current().env.rank}: {reply.text}")
        if reply.problem == m.ENDED:
            raise StreamEnded
        if reply.problem:
            raise UsageError(
                f"mode='pipeline': loader {self._loader.number} of this script is"
                f" {self._loader.recipe.facts} on rank {current().env.rank}, but {reply.text} on"
                f" data worker {connection.member.number}; call pl.shard for the same loaders in"
                " the same order in every process"
            )
        if memory is not None and connection.held > self._loader.lookahead + _HELD:
            memory = memory.clone()
        return unpack(reply.plain, memory)


class PipelineSource(IndexedSource):
    """A DataLoader whose samples have indices, and whose batches data workers make."""

    kind = "piped"

    def __init__(self, pipeline: _PipelineLoader, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pipeline, self.lookahead = pipeline, pipeline.lookahead

    def _maker(self, data_pass: DataPass) -> BatchFetcher:
        return self._pipeline.fetch(data_pass)


class PipelineStreamSource(StreamSource):
    """A DataLoader over an iterable dataset, which data workers read."""

    kind = "pipedstream"

    def __init__(
        self, pipeline: _PipelineLoader, loader: DataLoader[Any], nominal: int, batch: str
    ) -> None:
        super().__init__(loader, nominal, batch)
        self._pipeline, self.lookahead = pipeline, pipeline.lookahead

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield batches of this worker's samples."""
        set_epoch([self._loader.dataset], data_pass.epoch)
        share = (data_pass.group.size, data_pass.group.rank, self._per_step)
        fetcher = self._pipeline.fetch(data_pass)
        seed = mix_seeds(data_pass.seed, data_pass.epoch)
        yield from own_batches(
            data_pass,
            lambda: fetcher.run_stream(seed, share),
            (),
            self._too_few,
            stops_short=self._loader.drop_last,
        )


def pipeline_source(
    loader: Any,
    group: Group,
    batch: str,
    *,
    pad: bool,
    warmup: tuple[DataWarmup, int] | None,
    stages: Sequence[Stage],
) -> PipelineSource | PipelineStreamSource:
    """Return the source of a loader whose batches data workers make; UsageError if they cannot."""
    pipeline = _PipelineLoader(loader, stages)
    if not isinstance(loader.dataset, IterableDataset):
        return PipelineSource(pipeline, loader, group, group.size, batch, pad=pad, warmup=warmup)
    if warmup is not None:
        raise UsageError(
            f"warmup={warmup[0]}: a part of the data is drawn by index, which a stream does not"
            " allow; let the stream itself start with less data"
        )
    return PipelineStreamSource(pipeline, loader, group.size, batch)
