"""`pl.shard(loader)`: the same loop over batches as before, with this worker's part of the data.

The union of the workers' k-th batches is the batch that one process with the global batch size
would have seen. Before each batch its weight is announced to whoever exchanges the gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.consensus import agree, group_of
from paceline.data.elastic_pass import ElasticPass, agree_in_line
from paceline.data.indexed import lookahead_of
from paceline.data.ledger import ledger_of
from paceline.data.memory import is_remembered, memory_of, say_once
from paceline.data.passage import Line
from paceline.data.pipeline.recipe import Stage
from paceline.data.pipeline.source import Offered, Piped, PipedStream, offer, piped
from paceline.data.sources import Pass, Source, source_of
from paceline.data.warmup import DataWarmup
from paceline.errors import UsageError
from paceline.job import Job, current

MODES = ("shard", "pipeline")


def shard(
    loader: Iterable[Any],
    *,
    epoch: int | None = None,
    seed: int | None = None,
    batch: str = "worker",
    pad: bool = True,
    presharded: bool = False,
    resize: str = "global",
    warmup: DataWarmup | None = None,
    mode: str = "shard",
    stages: Sequence[Stage] = (),
) -> Sharded | Offered:
    """Return an iterable over this worker's part of a DataLoader (or of any iterable of batches).
    Collective: every rank calls it, with the same loader and arguments.

    `epoch` and `seed` decide on the order of a loader with shuffle=True; by default the passes are
    counted, and rank 0's seed is taken. `batch`: the loader's batch size is that of each "worker",
    or the "global" one, to be cut among them. `pad`: a worker without a sample for the last step
    repeats one with weight 0, so that all make the same number of steps; False, for evaluation,
    gives it no batch. `presharded`: each worker's loader has its own data; nothing is split, but
    steps and weights are agreed on. `resize`, for elastic jobs: when workers come or go, the
    "global" batch stays and each takes another part of it; or each "worker" keeps its batch size.
    `warmup`: the first epochs go over a part of the data (`pl.data_warmup`). `mode`: "shard", or
    "pipeline": data workers (`paceline run --data-workers 2`) make the batches, and apply `stages`,
    functions from a sample to a sample, before collate (docs/guides/data-workers.md).

    >>> [batch.tolist() for batch in pl.shard(DataLoader(range(5), batch_size=2))]
    [[0, 1], [2, 3], [4]]
    """
    if current().env.is_data_worker:
        return offer(loader, stages, batch, pad=pad, is_pipeline=mode == "pipeline")
    options = _Options(epoch, seed, batch, pad, presharded, resize, warmup, mode, tuple(stages))
    return Sharded(loader, options)


@dataclass(frozen=True)
class _Options:
    epoch: int | None
    seed: int | None
    batch: str
    pad: bool
    presharded: bool
    resize: str
    warmup: DataWarmup | None = None
    mode: str = "shard"
    stages: tuple[Stage, ...] = ()

    def check(self) -> None:
        """Refuse values that mean nothing."""
        if self.epoch is not None and _as_int("epoch", self.epoch) < 0:
            raise UsageError(f"epoch must be 0 or more (got {self.epoch}); the first one is 0")
        if self.seed is not None:
            _as_int("seed", self.seed)
        if self.batch not in ("worker", "global"):
            raise UsageError(f"batch must be 'worker' or 'global' (got {self.batch!r})")
        if self.resize not in ("worker", "global"):
            raise UsageError(f"resize must be 'worker' or 'global' (got {self.resize!r})")
        if self.mode not in MODES:
            raise UsageError(f"mode must be one of {', '.join(MODES)} (got {self.mode!r})")
        if self.mode == "pipeline" and self.presharded:
            raise UsageError("mode='pipeline' shares out one loader; leave out presharded=True")
        if self.stages and self.mode != "pipeline":
            raise UsageError("stages=[...] are for mode='pipeline'; let the dataset do them")
        if self.warmup is not None and not isinstance(self.warmup, DataWarmup):
            raise UsageError(
                f"warmup must be made by pl.data_warmup(fraction, epochs) (got {self.warmup!r:.60})"
            )

    def facts(self) -> dict[str, Any]:
        """The options as all ranks must have them."""
        return {
            "epoch": None if self.epoch is None else int(self.epoch),
            "seed": None if self.seed is None else str(int(self.seed)),
            "batch": self.batch,
            "pad": bool(self.pad),
            "presharded": bool(self.presharded),
            "resize": self.resize,
            "warmup": None if self.warmup is None else str(self.warmup),
            "mode": self.mode,
            "the number of stages": len(self.stages),
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
        job = current()
        self._loader, self._options = loader, options
        self._memory = memory_of(loader)
        self._group = group_of(job)
        self._line: Line | None = None
        if job.elastic.is_on:
            self._line = ledger_of(job).line_of(self._memory, is_remembered=is_remembered(loader))
        self._examine(epoch=None)

    def __iter__(self) -> Iterator[Any]:
        job, memory, options = current(), self._memory, self._options
        job.elastic.enter()  # a newcomer takes nothing before it is in
        epoch = self._next_epoch
        if self._line is not None and self._line.is_pass_over and job.elastic.is_lockstep:
            self._line.skip_pass(epoch)
            return
        self._examine(epoch)
        memory.next_epoch = epoch + 1
        announcer = job.contribution.announcer()
        this = Pass(
            group=self._group,
            announcer=announcer,
            epoch=epoch,
            seed=self._seed,
            lookahead=self._lookahead,
            pad=options.pad,
            memory=memory,
            say=partial(say_once, memory.said, self._group),
            elastic=self._elastic_pass(job, epoch),
        )
        try:
            yield from self._source.batches(this)
        finally:
            announcer.close()

    @property
    def _next_epoch(self) -> int:
        if self._options.epoch is not None:
            return operator.index(self._options.epoch)
        return self._memory.next_epoch if self._line is None else self._line.next_epoch

    def __len__(self) -> int:
        """Return the number of batches that this worker gets; TypeError where it is not known."""
        if self._length is None:
            raise TypeError(f"the number of batches of {type(self._loader).__name__} is not known")
        return self._length

    def _elastic_pass(self, job: Job, epoch: int) -> ElasticPass | None:
        if self._line is None:
            return None
        options = self._options
        return ElasticPass(
            job, ledger_of(job), self._line, options.resize, self._seed, epoch, options.pad
        )

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
            self._source = source
        except UsageError as error:
            problem = str(error)
        if self._line is None:
            told = agree(current(), problem, facts, aside)
        else:
            told = agree_in_line(current(), self._line, problem, facts, aside)
        self._accept(told)

    def _find_source(self, epoch: int) -> Source:
        if isinstance(self._loader, Sharded):
            raise UsageError("this loader went through pl.shard already; pass the plain one")
        job, options = current(), self._options
        if options.warmup is not None and job.elastic.is_on and not job.elastic.is_lockstep:
            raise UsageError(
                f"warmup={options.warmup}: in an elastic job with a free-running pace a newcomer"
                " finds its place in the data by counting steps, and epochs must be equally long;"
                " use a pace in lockstep, or a job without --min, --max and --on-loss"
            )
        if options.mode == "pipeline":
            return piped(
                self._loader,
                self._group,
                options.batch,
                pad=options.pad,
                warmup=None if options.warmup is None else (options.warmup, epoch),
                stages=options.stages,
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
        natural = int(told[0]["seed"]) if self._memory.seed is None else self._memory.seed
        if not current().elastic.is_candidate:  # who has not heard the others' yet
            self._memory.seed = natural
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
