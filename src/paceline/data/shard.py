"""`pl.shard(loader)`: the loop over batches of one process, with this worker's part of the data.

The union of the workers' k-th batches is the batch that one process with the global batch size
would see. The weight of each batch is announced to the gradient exchange before the batch.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.cursor.progress import UNNAMED, data_progress_of
from paceline.data.data_pass import DataPass, agree_if_new, group_of
from paceline.data.pass_report import report_epoch, timed
from paceline.data.sources.indexed import lookahead_of
from paceline.data.sources.loaders import (
    Opener,
    has_record,
    log_once,
    prepare,
    record_of,
    record_pass,
)
from paceline.data.sources.sources import Source
from paceline.data.split.modes import ShardOptions, source_of
from paceline.data.split.plan import DataWarmup
from paceline.data.split.weights import GivenCost
from paceline.data.workers.recipe import Stage
from paceline.data.workers.source import (
    PipelineSource,
    PipelineStreamSource,
    ServedLoader,
    register_loader,
)
from paceline.errors import UsageError
from paceline.runtime.job import current


def shard(
    loader: Iterable[Any] | Dataset[Any],
    *,
    mode: str = "shard",
    epoch: int | None = None,
    seed: int | None = None,
    batch: str = "worker",
    pad: bool = True,
    presharded: bool = False,
    resize: str = "global",
    warmup: DataWarmup | None = None,
    cost: GivenCost | None = None,
    open: Opener | None = None,
    stages: Sequence[Stage] = (),
    **settings: Any,
) -> ShardedLoader | ServedLoader:
    """Return an iterable over this worker's part of a DataLoader (or of any iterable of batches).
    Collective: every rank calls it, with the same loader and arguments.

    `mode`: "shard" gives each sample to one of the workers, to another one in each epoch.
    "partition" gives each worker its own part, the same in every epoch. "replicate" lets each
    worker go over all samples, in an order of its own. "dynamic" gives a faster worker more, also
    by the `cost` of samples (a number for each, or a function of the index). Instead of a loader
    you can pass a dataset, with the `settings` of a DataLoader (batch_size=...). With mode
    "partition" you can also pass a list of files, with `open`: a function that reads a file and
    yields its samples (with batch_size=...) or its batches.

    `epoch` and `seed` determine the order of a loader with shuffle=True. By default passes are
    counted, and rank 0's seed is used. `batch`: the loader's batch size is that of each "worker",
    or the "global" one, which is split among the workers; "auto": that of each worker on average,
    with more for faster workers. `pad`: a worker without a sample for the last step repeats one
    with weight 0, so that all workers make the same number of steps. False, for evaluation, gives
    it no batch. `presharded`: each worker's loader has its own data; nothing is split, but the
    workers agree on steps and weights. `resize`, for elastic jobs: when workers join or leave, the
    "global" batch stays the same and is split differently, or each "worker" keeps its batch size.
    `warmup`: the first epochs go over a part of the data (`pl.data_warmup`).

    mode "pipeline": data workers (`paceline run --data-workers 2`) make the batches, and apply
    `stages`, functions from a sample to a sample, before collate (docs/guides/data-workers.md).

    >>> [batch.tolist() for batch in pl.shard(DataLoader(range(5), batch_size=2))]
    [[0, 1], [2, 3], [4]]
    """
    made, problem = prepare(loader, open, settings)
    if current().env.is_data_worker:
        return register_loader(made, stages, batch, pad=pad, is_pipeline=mode == "pipeline")
    asked = (mode, epoch, seed, batch, pad, presharded, resize, warmup, cost, tuple(stages))
    return ShardedLoader(made, ShardOptions(*asked, problem))


class ShardedLoader:
    """This worker's part of a loader. Every iteration is one pass over it."""

    def __init__(self, loader: Any, options: ShardOptions) -> None:
        current().has_shared_data = True
        job = current().batch_view
        self._loader, self._options = loader, options
        self._record = record_of(loader)
        self._group = group_of(job)
        self._state = data_progress_of(job).state_of(self._record, is_kept=has_record(loader))
        self._examine(epoch=None)

    def __iter__(self) -> Iterator[Any]:
        job, record, options = current().batch_view, self._record, self._options
        job.elastic.join_running_job()  # a newcomer takes no batch before it has joined
        if options.epoch is not None and self._state.find(operator.index(options.epoch)):
            data_progress_of(job).catch_up()
        epoch = self._next_epoch
        if self._state.is_over(is_lockstep=job.elastic.is_lockstep):
            self._state.skip_pass(epoch)
            return
        self._examine(epoch)
        record.next_epoch = epoch + 1
        record_pass(self._loader, epoch + 1)
        announcer = job.contribution.announcer()
        data_pass = DataPass(
            job=job,
            group=self._group,
            progress=data_progress_of(job),
            loader=self._state,
            record=record,
            announcer=announcer,
            log_once=partial(log_once, record.logged, group_of(job.full_view)),
            facts=self._facts,
            epoch=epoch,
            seed=self._seed,
            lookahead=self._lookahead,
            pad=options.pad,
            resize=options.resize,
        )
        began_s = time.monotonic()
        try:
            if torch.is_grad_enabled():
                job.reporter.loop_progress.begin_pass(self._length)
            yield from timed(self._source.batches(data_pass), job, announcer)
        finally:
            announcer.close()
            ended, self._state.ended = self._state.ended, None
        if ended is not None:  # the pass was not broken off
            report_epoch(data_pass, ended, record.key or UNNAMED, began_s)

    @property
    def _next_epoch(self) -> int:
        if self._options.epoch is not None:
            return operator.index(self._options.epoch)
        if self._state.known_epoch is not None:
            return self._state.known_epoch
        return max(self._record.next_epoch, self._state.next_epoch)

    def __len__(self) -> int:
        """Return the number of batches of this worker; TypeError if it is not known."""
        if self._length is None:
            raise TypeError(f"the number of batches of {type(self._loader).__name__} is not known")
        return self._length

    def _examine(self, epoch: int | None) -> None:
        """Read the loader's settings, and agree on them with the other ranks. Collective."""
        problem, facts, aside = None, dict[str, Any](), dict[str, Any]()
        try:
            self._options.check()
            source = self._find_source(self._next_epoch if epoch is None else epoch)
            facts = {
                **self._options.facts(),
                "the kind of loader": source.kind,
                **source.facts,
                "the epoch of this pass": epoch,
            }
            aside = {
                "length": source.length,
                "lookahead": 0,
                "seed": str(_natural_seed(self._loader)),
            }
            if isinstance(source, PipelineSource | PipelineStreamSource):
                aside["lookahead"] = source.lookahead
            elif isinstance(self._loader, DataLoader):
                aside["lookahead"] = lookahead_of(self._loader)
            if epoch is not None and self._state.saved is not None:
                self._state.saved.require_same_data(facts, epoch)
            self._source, self._facts = source, facts
        except UsageError as error:
            problem, aside["problem"] = str(error), type(error).__name__
        self._accept(agree_if_new(current().batch_view, self._state, problem, facts, aside))

    def _find_source(self, epoch: int) -> Source:
        if isinstance(self._loader, ShardedLoader):
            raise UsageError("this loader is the result of pl.shard already; pass the plain one")
        job, record = current().batch_view, self._record
        return source_of(self._loader, self._group, job, record, self._options, epoch)

    def _accept(self, answers: list[dict[str, Any]]) -> None:
        """Use what the ranks agreed on: rank 0's seed, the longest lookahead and length."""
        if self._state.seed is not None:  # also that of a resumed run
            self._record.seed = self._state.seed
        natural = int(answers[0]["seed"]) if self._record.seed is None else self._record.seed
        if not current().elastic.is_joining:  # a candidate does not have the others' seed yet
            self._record.seed = self._state.seed = natural
        seed = self._options.seed
        self._seed = natural if seed is None else operator.index(seed)
        self._lookahead: int = max(answer["lookahead"] for answer in answers)
        self._length: int | None = self._source.length
        if self._options.pad and self._options.presharded:
            lengths = [answer["length"] for answer in answers]
            self._length = None if None in lengths else max(lengths)


def _natural_seed(loader: Any) -> int:
    """Return the seed with which the loader would have shuffled, as far as it can be known."""
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()
