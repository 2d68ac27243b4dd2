"""The modes of pl.shard, its options, and which of them the data allows.

    shard       each sample goes to one of the workers, to another one in each epoch
    partition   each worker has its own part, the same in every epoch (partition.py)
    replicate   each worker goes over all samples (replicate.py)
    dynamic     a faster worker takes more (dynamic.py)
    pipeline    as shard; data workers make the batches (data/workers/)

If a mode is not possible, pl.shard raises UsageError; it never falls back to another mode.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.comm.group import Group
from paceline.data.sources.loaders import FileList, LoaderRecord
from paceline.data.sources.sources import (
    IndexedSource,
    ItemSource,
    PreshardedSource,
    Source,
    StreamSource,
)
from paceline.data.split.dynamic import DynamicSource
from paceline.data.split.partition import FileSource, PartitionedSource
from paceline.data.split.plan import DataWarmup
from paceline.data.split.replicate import ReplicatedSource
from paceline.data.split.weights import GivenCost
from paceline.data.workers.recipe import Stage
from paceline.data.workers.source import pipeline_source
from paceline.errors import UsageError
from paceline.runtime.config import requested_probe
from paceline.runtime.job import Job
from paceline.runtime.probe_spec import parse_probe

MODES = ("shard", "partition", "replicate", "dynamic", "pipeline")


@dataclass(frozen=True)
class ShardOptions:
    """The arguments of pl.shard."""

    mode: str
    epoch: int | None
    seed: int | None
    batch: str
    pad: bool
    presharded: bool
    resize: str
    warmup: DataWarmup | None
    cost: GivenCost | None
    stages: tuple[Stage, ...]
    problem: str | None = None  # with the loader

    def check(self) -> None:
        """Raise UsageError for arguments that no loader allows."""
        if self.problem is not None:
            raise UsageError(self.problem)
        self._check_mode()
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

    def _check_mode(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode must be one of {', '.join(MODES)} (got {self.mode!r})")
        if self.stages and self.mode != "pipeline":
            raise UsageError("stages=[...] are for mode='pipeline'; let the dataset do them")
        if self.cost is not None and self.mode != "dynamic":
            raise UsageError(f"cost=... goes with mode='dynamic' (got mode={self.mode!r})")
        if self.batch == "auto" and self.mode not in ("shard", "dynamic"):
            raise UsageError(f"batch='auto' goes with mode 'shard' (got mode={self.mode!r})")
        if self.mode == "dynamic" and self.batch == "global":
            raise UsageError(
                "mode='dynamic' with batch='global': batch_size is that of a worker of average"
                " speed; use batch='worker', and divide batch_size by the number of workers"
            )
        if self.mode == "shard" and self.batch != "auto":
            return
        if self.presharded:
            what = f"mode={self.mode!r}" if self.mode != "shard" else "batch='auto'"
            raise UsageError(
                f"{what} with presharded=True: with the latter each worker has its own data"
                " already, and nothing is split; leave one of them out"
            )
        if self.warmup is not None and self.mode in ("partition", "replicate"):
            raise UsageError(f"mode={self.mode!r} with warmup={self.warmup}: use mode='shard'")

    def facts(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks."""
        return {
            "mode": self.mode,
            "epoch": None if self.epoch is None else int(self.epoch),
            "seed": None if self.seed is None else str(int(self.seed)),
            "batch": self.batch,
            "pad": bool(self.pad),
            "presharded": bool(self.presharded),
            "resize": self.resize,
            "warmup": None if self.warmup is None else str(self.warmup),
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


def source_of(
    loader: Any, group: Group, job: Job, record: LoaderRecord, options: ShardOptions, epoch: int
) -> Source:
    """Return the source for a loader; UsageError if it cannot be divided in this mode."""
    mode, batch, pad, is_elastic = options.mode, options.batch, options.pad, job.elastic.is_on
    warmup = None if options.warmup is None else (options.warmup, epoch)
    if mode == "dynamic" or batch == "auto":
        _refuse_copies(job, options)
    if isinstance(loader, FileList):
        if mode != "partition":
            raise UsageError(
                f"open=... goes with mode='partition', in which each worker has its own files (got"
                f" mode={mode!r})"
            )
        _refuse_elastic(mode, is_elastic=is_elastic)
        return FileSource(loader, group, pad=pad)
    if mode == "shard" and batch != "auto":
        return _sharded(loader, group, job, options, warmup)
    if mode == "pipeline":
        return pipeline_source(loader, group, batch, pad=pad, warmup=warmup, stages=options.stages)
    _require_indices(loader, mode)
    if mode == "partition":
        _refuse_elastic(mode, is_elastic=is_elastic)
        return PartitionedSource(loader, group, batch, pad=pad)
    if mode == "replicate":
        _refuse_elastic(mode, is_elastic=is_elastic)
        return ReplicatedSource(loader, batch)
    return DynamicSource(
        loader, group, job, record, mode, pad=pad, cost=options.cost, warmup=warmup
    )


def _sharded(
    loader: Any,
    group: Group,
    job: Job,
    options: ShardOptions,
    warmup: tuple[DataWarmup, int] | None,
) -> Source:
    """Return the source of a loader in mode "shard"."""
    batch, presharded = options.batch, options.presharded
    # The number of workers that determines the size of a global batch.
    nominal = job.env.world_size if job.elastic.is_on else group.size
    if group.size == 1:  # it may stand for several workers (`paceline parity`)
        nominal = parse_probe(requested_probe()).stands_for or nominal
    if warmup is not None and job.elastic.is_on and not job.elastic.is_lockstep:
        raise UsageError(
            f"warmup={warmup[0]}: in an elastic job with a free-running pace a newcomer finds its"
            " position in the data by counting steps, so epochs must have the same length; use a"
            " lockstep pace, or a job without --min, --max and --on-loss"
        )
    if isinstance(loader, Dataset):
        raise UsageError(
            f"a {type(loader).__name__} is a dataset; pass a DataLoader over it, as for training"
            " in one process, or batch_size=..."
        )
    if not hasattr(loader, "__iter__"):
        raise UsageError(f"expected a DataLoader or an iterable of batches, found {loader!r}")
    if warmup is not None and (presharded or not _has_indices(loader)):
        what = "presharded=True" if presharded else f"a {type(loader).__name__} without indices"
        raise UsageError(
            f"warmup={warmup[0]}: a part of the data is drawn by index, which {what} does not"
            " allow; let the stream itself start with less data"
        )
    if presharded:
        return PreshardedSource(loader)
    if not isinstance(loader, DataLoader):
        if batch == "global":
            raise UsageError(
                f"batch='global' splits batches, but a {type(loader).__name__} yields finished"
                " batches; pass a DataLoader, or use batch='worker'"
            )
        return ItemSource(loader, group, pad=options.pad)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, nominal, batch)
    return IndexedSource(loader, group, nominal, batch, pad=options.pad, warmup=warmup)


def _has_indices(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _refuse_copies(job: Job, options: ShardOptions) -> None:
    """Raise UsageError for a split by speed if several workers must get the same batch."""
    if job.mesh is not None and job.mesh.pp * job.mesh.tp > 1:
        what = f"mode={options.mode!r}" if options.mode == "dynamic" else "batch='auto'"
        raise UsageError(
            f"{what} with mesh {job.mesh}: the workers of a unit get the same batch, but have"
            " different speeds; use mode='shard' with a batch size of your own"
        )


def _refuse_elastic(mode: str, *, is_elastic: bool) -> None:
    if not is_elastic:
        return
    why = {
        "partition": "no worker would read the part of a lost worker",
        "replicate": "a newcomer would go over all data from the beginning",
    }
    raise UsageError(
        f"mode={mode!r} in an elastic job: {why[mode]}; use mode='shard' or 'dynamic', or a job"
        " without --min, --max and --on-loss"
    )


def _require_indices(loader: Any, mode: str) -> None:
    if _has_indices(loader):
        return
    what = f"a {type(loader).__name__}"
    if isinstance(loader, DataLoader):
        what = f"a stream ({type(loader.dataset).__name__})"
    advice = {
        "partition": "pass a list of files with open=..., or presharded=True with a stream that"
        " reads only its worker's part",
        "replicate": "pass presharded=True with a stream that is in another order on each worker",
        "dynamic": "use mode='shard', or a dataset with indices",
        "shard": "use batch='worker'",
    }
    asked = f"mode={mode!r}" if mode != "shard" else "batch='auto'"
    raise UsageError(f"{asked} needs indices, which {what} does not have; {advice[mode]}")
