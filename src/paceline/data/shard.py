"""`pl.shard(loader)`: the same loop over batches as before, with this worker's part of the data.

The union of the workers' k-th batches is the batch that one process with the global batch size
would have seen. Before each batch its weight is announced to whoever exchanges the gradients.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.agreement import group_of
from paceline.data.cursor.epoch_summary import tell_epoch
from paceline.data.cursor.ledger import OTHERS, ledger_of
from paceline.data.cursor.passes import Pass, agree_in_line
from paceline.data.sources.indexed import lookahead_of
from paceline.data.sources.loaders import (
    Opener,
    given,
    is_remembered,
    memory_of,
    note_pass,
    say_once,
)
from paceline.data.sources.sources import Source
from paceline.data.split.modes import Options, source_of
from paceline.data.split.plan import DataWarmup
from paceline.data.split.weights import GivenCost
from paceline.data.wait_time import timed
from paceline.data.workers.recipe import Stage
from paceline.data.workers.source import Offered, Piped, PipedStream, offer
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
) -> Sharded | Offered:
    """Return an iterable over this worker's part of a DataLoader (or of any iterable of batches).
    Collective: every rank calls it, with the same loader and arguments.

    `mode`: "shard", each sample goes to one of the workers, in each epoch to another; "partition",
    each worker has its own part, the same in every epoch; "replicate", each goes over everything in
    an order of its own; "dynamic", who is faster takes more, also by the `cost` of samples (a
    number for each, or a function of the index). A dataset may take the place of the loader, with
    the `settings` of a DataLoader (batch_size=...); with mode "partition" also a list of files,
    with `open`: a function that reads one of them, for each of its samples with batch_size=...,
    else batches.

    `epoch` and `seed` decide on the order of a loader with shuffle=True; by default the passes are
    counted, and rank 0's seed is taken. `batch`: the loader's batch size is that of each "worker",
    or the "global" one, to be cut among them; "auto": that of each worker on average, more for the
    faster ones. `pad`: a worker without a sample for the last step repeats one with weight 0, so
    that all make the same number of steps; False, for evaluation, gives it no batch. `presharded`:
    each worker's loader has its own data; nothing is split, but steps and weights are agreed on.
    `resize`, for elastic jobs: when workers come or go, the "global" batch stays and each takes
    another part of it; or each "worker" keeps its batch size. `warmup`: the first epochs go over a
    part of the data (`pl.data_warmup`).

    mode "pipeline": data workers (`paceline run --data-workers 2`) make the batches, and apply
    `stages`, functions from a sample to a sample, before collate (docs/guides/data-workers.md).

    >>> [batch.tolist() for batch in pl.shard(DataLoader(range(5), batch_size=2))]
    [[0, 1], [2, 3], [4]]
    """
    made, problem = given(loader, open, settings)
    if current().env.is_data_worker:
        return offer(made, stages, batch, pad=pad, is_pipeline=mode == "pipeline")
    asked = (mode, epoch, seed, batch, pad, presharded, resize, warmup, cost, tuple(stages))
    return Sharded(made, Options(*asked, problem))


class Sharded:
    """This worker's part of a loader; every iteration is one pass over it."""

    def __init__(self, loader: Any, options: Options) -> None:
        current().has_shared_data = True
        job = current().sharers
        self._loader, self._options = loader, options
        self._memory = memory_of(loader)
        self._group = group_of(job)
        self._line = ledger_of(job).line_of(self._memory, is_remembered=is_remembered(loader))
        self._examine(epoch=None)

    def __iter__(self) -> Iterator[Any]:
        job, memory, options = current().sharers, self._memory, self._options
        job.elastic.enter()  # a newcomer takes nothing before it is in
        if options.epoch is not None and self._line.find(operator.index(options.epoch)):
            ledger_of(job).catch_up()
        epoch = self._next_epoch
        if self._line.is_over(is_lockstep=job.elastic.is_lockstep):
            self._line.skip_pass(epoch)
            return
        self._examine(epoch)
        memory.next_epoch = epoch + 1
        note_pass(self._loader, epoch + 1)
        announcer = job.contribution.announcer()
        this = Pass(
            job=job,
            group=self._group,
            ledger=ledger_of(job),
            line=self._line,
            memory=memory,
            announcer=announcer,
            say=partial(say_once, memory.said, group_of(job.whole)),
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
                job.reporter.headway.begin_pass(self._length)
            yield from timed(self._source.batches(this), job, announcer)
        finally:
            announcer.close()
            ended, self._line.ended = self._line.ended, None
        if ended is not None:  # and has come to its end
            tell_epoch(this, ended, memory.line or OTHERS, began_s)

    @property
    def _next_epoch(self) -> int:
        if self._options.epoch is not None:
            return operator.index(self._options.epoch)
        if self._line.told_epoch is not None:
            return self._line.told_epoch
        return max(self._memory.next_epoch, self._line.next_epoch)

    def __len__(self) -> int:
        """Return the number of batches that this worker gets; TypeError where it is not known."""
        if self._length is None:
            raise TypeError(f"the number of batches of {type(self._loader).__name__} is not known")
        return self._length

    def _examine(self, epoch: int | None) -> None:
        """Look at the loader, and agree with the other ranks about what is there. Collective."""
        problem, facts, aside = None, dict[str, Any](), dict[str, Any]()
        try:
            self._options.check()
            source = self._find_source(self._next_epoch if epoch is None else epoch)
            facts = {
                **self._options.facts(),
                "the kind of loader": type(source).__name__.lower(),
                **source.facts,
                "the epoch of this pass": epoch,
            }
            aside = {
                "length": source.length,
                "lookahead": 0,
                "seed": str(_natural_seed(self._loader)),
            }
            if isinstance(source, Piped | PipedStream):
                aside["lookahead"] = source.lookahead
            elif isinstance(self._loader, DataLoader):
                aside["lookahead"] = lookahead_of(self._loader)
            if epoch is not None and self._line.saved is not None:
                self._line.saved.require_same_data(facts, epoch)
            self._source, self._facts = source, facts
        except UsageError as error:
            problem, aside["problem"] = str(error), type(error).__name__
        self._accept(agree_in_line(current().sharers, self._line, problem, facts, aside))

    def _find_source(self, epoch: int) -> Source:
        if isinstance(self._loader, Sharded):
            raise UsageError("this loader went through pl.shard already; pass the plain one")
        job, memory = current().sharers, self._memory
        return source_of(self._loader, self._group, job, memory, self._options, epoch)

    def _accept(self, told: list[dict[str, Any]]) -> None:
        """Take over what the ranks told: rank 0's seed, the longest lookahead and length."""
        if self._line.seed is not None:  # also of the run that is resumed
            self._memory.seed = self._line.seed
        natural = int(told[0]["seed"]) if self._memory.seed is None else self._memory.seed
        if not current().elastic.is_candidate:  # who has not heard the others' yet
            self._memory.seed = self._line.seed = natural
        seed = self._options.seed
        self._seed = natural if seed is None else operator.index(seed)
        self._lookahead: int = max(theirs["lookahead"] for theirs in told)
        self._length: int | None = self._source.length
        if self._options.pad and self._options.presharded:
            lengths = [theirs["length"] for theirs in told]
            self._length = None if None in lengths else max(lengths)


def _natural_seed(loader: Any) -> int:
    """Return the seed that the loader would have shuffled with, as far as it can be known."""
    for place in (loader, getattr(loader, "sampler", None)):
        generator = getattr(place, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()
