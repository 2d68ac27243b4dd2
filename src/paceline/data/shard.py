"""`pl.shard(loader)`: the same loop over batches as before, with this worker's part of the data.

The union of the workers' k-th batches is the batch that one process with the global batch size
would have seen. Before each batch its weight is announced to whoever exchanges the gradients.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.consensus import group_of
from paceline.data.costs import GivenCost
from paceline.data.elastic_pass import ElasticPass, agree_in_line
from paceline.data.epoch_line import tell_epoch
from paceline.data.given import Opener, given, note_pass
from paceline.data.indexed import lookahead_of
from paceline.data.ledger import OTHERS, ledger_of
from paceline.data.memory import is_remembered, memory_of, say_once
from paceline.data.modes import Wish, source_in_mode
from paceline.data.pipeline.recipe import Stage
from paceline.data.pipeline.source import Offered, Piped, PipedStream, offer
from paceline.data.sources import Pass, Source, source_of
from paceline.data.timing import timed
from paceline.data.warmup import DataWarmup
from paceline.errors import UsageError
from paceline.job import Job, current


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
    wish = Wish(mode, batch, pad, presharded, warmup, cost, tuple(stages))
    options = _Options(epoch, seed, batch, pad, presharded, resize, warmup, wish, problem)
    return Sharded(made, options)


@dataclass(frozen=True)
class _Options:
    epoch: int | None
    seed: int | None
    batch: str
    pad: bool
    presharded: bool
    resize: str
    warmup: DataWarmup | None
    wish: Wish
    problem: str | None = None  # with what was given

    def check(self) -> None:
        """Refuse values that mean nothing."""
        if self.problem is not None:
            raise UsageError(self.problem)
        self.wish.check()
        if self.epoch is not None and _as_int("epoch", self.epoch) < 0:
            raise UsageError(f"epoch must be 0 or more (got {self.epoch}); the first one is 0")
        if self.seed is not None:
            _as_int("seed", self.seed)
        if self.batch not in ("worker", "global", "auto"):
            raise UsageError(f"batch must be 'worker' or 'global', or 'auto' (got {self.batch!r})")
        if self.resize not in ("worker", "global"):
            raise UsageError(f"resize must be 'worker' or 'global' (got {self.resize!r})")
        if self.warmup is not None and not isinstance(self.warmup, DataWarmup):
            raise UsageError(
                f"warmup must be made by pl.data_warmup(fraction, epochs) (got {self.warmup!r:.60})"
            )

    def facts(self) -> dict[str, Any]:
        """The options as all ranks must have them."""
        return {
            "mode": self.wish.mode,
            "epoch": None if self.epoch is None else int(self.epoch),
            "seed": None if self.seed is None else str(int(self.seed)),
            "batch": self.batch,
            "pad": bool(self.pad),
            "presharded": bool(self.presharded),
            "resize": self.resize,
            "warmup": None if self.warmup is None else str(self.warmup),
            "the number of stages": len(self.wish.stages),
        }


def _as_int(name: str, value: Any) -> int:
    wrong = UsageError(f"{name} must be an integer or None (got {value!r})")
    if isinstance(value, bool):
        raise wrong
    try:
        return operator.index(value)
    except TypeError:
        raise wrong from None


class Sharded:
    """This worker's part of a loader; every iteration is one pass over it."""

    def __init__(self, loader: Any, options: _Options) -> None:
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
        if self._line.is_pass_done or (self._line.is_pass_over and job.elastic.is_lockstep):
            self._line.skip_pass(epoch)
            return
        self._examine(epoch)
        memory.next_epoch = epoch + 1
        note_pass(self._loader, epoch + 1)
        announcer = job.contribution.announcer()
        this = Pass(
            group=self._group,
            announcer=announcer,
            epoch=epoch,
            seed=self._seed,
            lookahead=self._lookahead,
            pad=options.pad,
            memory=memory,
            say=partial(say_once, memory.said, group_of(job.whole)),
            entry=self._entry(job, epoch),
        )
        began_s, batches = time.monotonic(), self._source.batches(this)
        is_noted = getattr(self._source, "is_noted", False)  # by itself
        try:
            given = batches if is_noted else this.entry.noted(batches)
            if torch.is_grad_enabled():
                job.reporter.headway.begin_pass(self._length)
            yield from timed(given, job, announcer)
        finally:
            announcer.close()
            ended, self._line.ended = self._line.ended, None
        if ended is not None:  # and has come to its end
            tell_epoch(this.entry, ended, memory.line or OTHERS, began_s)

    @property
    def _next_epoch(self) -> int:
        if self._options.epoch is not None:
            return operator.index(self._options.epoch)
        if self._line.saved is not None:
            return self._line.saved.epoch
        return max(self._memory.next_epoch, self._line.next_epoch)

    def __len__(self) -> int:
        """Return the number of batches that this worker gets; TypeError where it is not known."""
        if self._length is None:
            raise TypeError(f"the number of batches of {type(self._loader).__name__} is not known")
        return self._length

    def _entry(self, job: Job, epoch: int) -> ElasticPass:
        resize, pad = self._options.resize, self._options.pad
        ledger = ledger_of(job)
        return ElasticPass(job, ledger, self._line, resize, self._seed, epoch, pad, self._facts)

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
        job, options = current().sharers, self._options
        found = source_in_mode(self._loader, self._group, job, self._memory, options.wish, epoch)
        if found is not None:
            return found
        if options.warmup is not None and job.elastic.is_on and not job.elastic.is_lockstep:
            raise UsageError(
                f"warmup={options.warmup}: in an elastic job with a free-running pace a newcomer"
                " finds its place in the data by counting steps, and epochs must be equally long;"
                " use a pace in lockstep, or a job without --min, --max and --on-loss"
            )
        return source_of(
            self._loader,
            self._group,
            job.env.world_size if job.elastic.is_on else self._group.size,
            options.batch,
            pad=options.pad,
            presharded=options.presharded,
            warmup=None if options.warmup is None else (options.warmup, epoch),
        )

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
        self._length: int | None = getattr(self._source, "length", None)
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
