"""mode="partition": each worker has its own part of the data, the same in every epoch.

Part k of w is the k-th of w contiguous ranges, as even as they can be: of the indices of a dataset,
or of a list of files. A worker never asks the dataset for a sample of another part, nor opens
another file, so that each host needs its own part only, and what it has cached stays useful. With
shuffle=True the samples of a part (or its files) come in another order in each epoch, but never
leave it: which samples meet in a step varies less than with mode="shard".

Parts may differ by a sample, files by anything. All workers make the same number of steps: one
whose part is used up repeats something with weight 0.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.comm.group import Group
from paceline.data.cursor.passes import Pass
from paceline.data.randomness import mixed
from paceline.data.sources.indexed import IndexedLoader, copied, plain, settings_of
from paceline.data.sources.loaders import FileList, Opener
from paceline.data.sources.samples import samples_in
from paceline.data.sources.synchronized_stream import own_batches
from paceline.data.split.order import LocalOrder
from paceline.data.split.plan import length_of, plan
from paceline.data.split.weights import share, weight
from paceline.errors import UsageError


def own_parts(
    indices: Sequence[int],
    parts: Sequence[int],  # samples of each worker
    sizes: Sequence[int],  # samples in a batch of each worker
    rank: int,
    *,
    steps: int,
    is_batched: bool,
    this: Pass,
) -> Iterator[tuple[Any, float]]:
    """Yield one worker's batches of one pass, all of its own part, and their weights."""
    mine_size = sizes[rank]
    for step in range(steps):
        counts = [
            max(0, min(size, part - step * size)) for part, size in zip(parts, sizes, strict=True)
        ]
        mine = indices[step * mine_size : (step + 1) * mine_size]
        if not all(counts):
            this.say(
                f"shard: the parts of {len(counts)} workers differ by a few samples; one that"
                " is used up repeats a sample with weight 0 in the last steps"
            )
        if not len(mine):
            if not this.pad:
                return
            mine = indices[:1]
        made = plain(mine) if is_batched else plain(mine)[0]
        yield made, weight(counts[rank], sum(counts), len(counts))


class Partitioned:
    """A loader whose samples have indices, each owned by one worker."""

    def __init__(self, loader: DataLoader[Any], group: Group, batch: str, *, pad: bool) -> None:
        made = plan(loader, group.size, batch, pad=pad)
        if made.told is not None:
            raise UsageError(
                f"mode='partition' owns ranges of indices, but the loader has a sampler of its own"
                f" ({type(made.told).__name__}), which decides about all of them; use mode='shard',"
                " or a sampler over the worker's own indices with presharded=True"
            )
        assert made.units is not None, "without a sampler of the user the length is known"
        self._loader, self._rank, self._is_shuffled = loader, group.rank, made.is_shuffled
        workers = range(group.size)
        self._samples = made.units
        self._parts = [len(share(made.units, group.size, rank)) for rank in workers]
        self._sizes = [len(share(made.per_step, group.size, rank)) for rank in workers]
        pairs = list(zip(self._parts, self._sizes, strict=True))
        if loader.drop_last:
            self._steps = min(part // size for part, size in pairs)
        else:
            self._steps = max(-(-part // size) for part, size in pairs)
        if not self._steps:
            raise UsageError(
                f"each worker's part has {min(self._parts)} samples, fewer than a batch, and"
                " drop_last=True drops them all; use a smaller batch_size or drop_last=False"
            )
        part, size = pairs[group.rank]
        self.length: int | None = self._steps if pad else min(self._steps, -(-part // size))

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that decide on the parts."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
            "the sampler": type(self._loader.sampler).__name__,
        }

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield batches of this worker's part."""
        own = share(self._samples, this.group.size, self._rank)
        seed = mixed(this.seed, this.epoch, 1 + self._rank)
        order = LocalOrder(len(own), seed if self._is_shuffled else None)
        indices = [own[place] for place in order.units(0, len(own))]
        is_batched = self._loader.batch_size is not None
        shares = (self._parts, self._sizes, self._rank)
        parts = own_parts(indices, *shares, steps=self._steps, is_batched=is_batched, this=this)
        key = ("partition", *settings_of(self._loader))
        copy = this.memory.copy_for(key, lambda: IndexedLoader(self._loader))
        yield from this.noted(copy.run(parts, this.announcer, seed))


class FilePart(IterableDataset[Any]):
    """What some files have in them, one after the other; each is opened by one process."""

    def __init__(self, files: Sequence[Any], opener: Opener, rank: int) -> None:
        self._files, self._open, self._rank = files, opener, rank

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = self._files if info is None else self._files[info.id :: info.num_workers]
        for file in mine:
            yield from self._read(file)

    def _read(self, file: Any) -> Iterator[Any]:
        number = 0
        try:
            for thing in self._open(file):
                yield thing
                number += 1
        except Exception as error:
            raise UsageError(
                f"pl.shard: {file}, behind {number} samples or batches, could not be read on rank"
                f" {self._rank}: {type(error).__name__}: {error}"
            ) from error


class Counting:
    """A collate function that also says how many samples it was given."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self._collate(samples)


class Files:
    """A list of files, each owned by one worker."""

    def __init__(self, given: FileList, group: Group, *, pad: bool) -> None:
        self._given, self._rank = given, group.rank
        count, workers = len(given.files), group.size
        if count == 0:
            raise UsageError("the list of files is empty")
        if count < workers and pad:
            raise UsageError(
                f"{count} files for {workers} workers, fewer than one each; write more and smaller"
                f" files, start at most {count} workers, or pass pad=False if some may get none"
            )
        self._own = [given.files[place] for place in share(count, workers, group.rank)]
        self.length: int | None = None  # nobody has opened them yet
        self._loader = self._loader_over(self._own)  # refuses settings that mean nothing

    @property
    def facts(self) -> dict[str, Any]:
        """The names of all files: the parts are cut from one list."""
        names = "\0".join(map(str, self._given.files))
        return {
            "the number of files": len(self._given.files),
            "the list of files": hashlib.sha256(names.encode()).hexdigest()[:16],
            "batch_size": self._given.settings["batch_size"],
            "shuffle": self._given.is_shuffled,
        }

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield what is in this worker's files, in step with the others."""
        seed = mixed(this.seed, this.epoch, 1 + this.group.rank)
        order = LocalOrder(len(self._own), seed if self._given.is_shuffled else None)
        files = [self._own[place] for place in order.units(0, sys.maxsize)]
        loader = self._loader_over(files)
        loader.generator.manual_seed(seed)
        is_batched = self._given.settings["batch_size"] is not None
        yield from own_batches(
            this,
            lambda: iter(loader) if is_batched else ((samples_in(one), one) for one in loader),
            (),
            "its files are empty; give each worker a file with something in it, or pass pad=False",
            stops_short=bool(self._given.settings.get("drop_last")),
        )

    def _loader_over(self, files: Sequence[Any]) -> Any:
        try:
            loader: DataLoader[Any] = DataLoader(
                FilePart(files, self._given.open, self._rank), **self._given.settings
            )
        except (TypeError, ValueError) as error:
            raise UsageError(f"the settings of a loader over files: {error}") from None
        if loader.batch_size is None:
            return copied(loader)
        return copied(loader, collate_fn=Counting(loader.collate_fn))
