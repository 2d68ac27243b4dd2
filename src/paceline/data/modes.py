"""The ways to share data out, and which of them each kind of data allows.

    shard       each sample goes to one of the workers, another one in each epoch
    partition   each worker has its own part, the same in every epoch (partition.py)
    replicate   each worker goes over everything (replicate.py)
    dynamic     who is faster takes more (dynamic.py)
    pipeline    as shard; data workers make the batches (pipeline/)

What cannot be done as it was asked for is refused; no mode stands in for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.collectives.group import Group
from paceline.data.costs import GivenCost
from paceline.data.dynamic import Dynamic
from paceline.data.given import FileList
from paceline.data.memory import Memory
from paceline.data.partition import Files, Partitioned
from paceline.data.pipeline.recipe import Stage
from paceline.data.pipeline.source import piped
from paceline.data.replicate import Replicated
from paceline.data.sources import Source
from paceline.data.warmup import DataWarmup
from paceline.errors import UsageError
from paceline.job import Job

MODES = ("shard", "partition", "replicate", "dynamic", "pipeline")


@dataclass(frozen=True)
class Wish:
    """What pl.shard was asked for, as far as it concerns the mode."""

    mode: str
    batch: str
    pad: bool
    presharded: bool
    warmup: DataWarmup | None
    cost: GivenCost | None = None
    stages: tuple[Stage, ...] = ()

    def check(self) -> None:
        """Refuse what means nothing, whatever the data is."""
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
                "mode='dynamic' with batch='global': batch_size is what a worker of average speed"
                " gets; divide it by the number of workers"
            )
        if self.mode == "shard" and self.batch != "auto":
            return
        if self.presharded:
            what = f"mode={self.mode!r}" if self.mode != "shard" else "batch='auto'"
            raise UsageError(
                f"{what} with presharded=True: with the latter each worker has its own data"
                " already, and nothing is shared out; leave one of them out"
            )
        if self.warmup is not None and self.mode in ("partition", "replicate"):
            raise UsageError(f"mode={self.mode!r} with warmup={self.warmup}: use mode='shard'")


def source_in_mode(
    loader: Any, group: Group, job: Job, memory: Memory, wish: Wish, epoch: int
) -> Source | None:
    """Return what makes the passes in this mode; None: mode "shard" does (sources.py)."""
    is_elastic = job.elastic.is_on
    if wish.mode == "dynamic" or wish.batch == "auto":
        _refuse_copies(job, wish)
    if isinstance(loader, FileList):
        if wish.mode != "partition":
            raise UsageError(
                f"open=... goes with mode='partition', in which each worker has its own files (got"
                f" mode={wish.mode!r})"
            )
        _refuse_elastic(wish.mode, is_elastic=is_elastic)
        return Files(loader, group, pad=wish.pad)
    if wish.mode == "shard" and wish.batch != "auto":
        return None
    warmup = None if wish.warmup is None else (wish.warmup, epoch)
    if wish.mode == "pipeline":
        return piped(loader, group, wish.batch, pad=wish.pad, warmup=warmup, stages=wish.stages)
    _require_indices(loader, wish.mode)
    if wish.mode == "partition":
        _refuse_elastic(wish.mode, is_elastic=is_elastic)
        return Partitioned(loader, group, wish.batch, pad=wish.pad)
    if wish.mode == "replicate":
        _refuse_elastic(wish.mode, is_elastic=is_elastic)
        return Replicated(loader, wish.batch)
    place = (loader, group, job, memory, wish.mode)
    return Dynamic(*place, pad=wish.pad, cost=wish.cost, warmup=warmup)


def _refuse_copies(job: Job, wish: Wish) -> None:
    """Refuse to cut by speed where several workers must get the same batch."""
    if job.mesh is not None and job.mesh.pp * job.mesh.tp > 1:
        what = f"mode={wish.mode!r}" if wish.mode == "dynamic" else "batch='auto'"
        raise UsageError(
            f"{what} with mesh {job.mesh}: the workers of a unit get the same batch, but would each"
            " go by their own speed; use mode='shard' with a batch size of your own"
        )


def _refuse_elastic(mode: str, *, is_elastic: bool) -> None:
    if not is_elastic:
        return
    why = {
        "partition": "the part of a lost worker would be read by nobody",
        "replicate": "a newcomer would go over everything from the beginning",
    }
    raise UsageError(
        f"mode={mode!r} in an elastic job: {why[mode]}; use mode='shard' or 'dynamic', or a job"
        " without --min, --max and --on-loss"
    )


def _require_indices(loader: Any, mode: str) -> None:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
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
    raise UsageError(f"{asked} goes by index, which {what} does not have; {advice[mode]}")
