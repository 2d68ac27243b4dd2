"""mode="partition": each worker has its own part of the data, the same in every epoch.

Part k of w is the k-th of w contiguous ranges, as even as possible: of the indices of a dataset, or
of a list of files. A worker never requests a sample of another part from the dataset, nor opens
another file. So each host needs only its own part, and cached data stays useful. With shuffle=True
the samples of a part (or its files) come in another order in each epoch, but never leave the part:
the samples of a step vary less than with mode="shard".

Parts may differ by one sample, files by any number. All workers make the same number of steps: a
worker whose part is used up repeats a sample with weight 0.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.comm.group import Group
from paceline.data.data_pass import DataPass
from paceline.data.randomness import mix_seeds
from paceline.data.sources.indexed import IndexedLoader, copied, plain, settings_of
from paceline.data.sources.loaders import FileList, Opener
from paceline.data.sources.stream import TaggingCollate
from paceline.data.sources.synchronized_stream import own_batches
from paceline.data.split.order import LocalOrder
from paceline.data.split.plan import length_of, plan_batches
from paceline.data.split.weights import share, weight
from paceline.errors import UsageError


def own_parts(
    indices: Sequence[int],
    parts: Sequence[int],  # samples of each worker
    sizes: Sequence[int],  # batch size of each worker
    rank: int,
    *,
    steps: int,
    is_batched: bool,
    data_pass: DataPass,
) -> Iterator[tuple[Any, float]]:
    """Yield the batches of one worker, all from its own part, and their weights."""
    mine_size = sizes[rank]
    for step in range(steps):
        counts = [
            max(0, min(size, part - step * size)) for part, size in zip(parts, sizes, strict=True)
        ]
        mine = indices[step * mine_size : (step + 1) * mine_size]
        if not all(counts):
            data_pass.log_once(
                f"shard: the parts of {len(counts)} workers differ by a few samples; a worker whose"
                " part is used up repeats a sample with weight 0 in the last steps"
            )
        if not len(mine):
            if not data_pass.pad:
                return
            mine = indices[:1]
        made = plain(mine) if is_batched else plain(mine)[0]
        yield made, weight(counts[rank], sum(counts), len(counts))


class PartitionedSource:
    """A loader whose samples have indices, each owned by one worker."""

    kind = "partitioned"

    def __init__(self, loader: DataLoader[Any], group: Group, batch: str, *, pad: bool) -> None:
        made = plan_batches(loader, group.size, batch, pad=pad)
        if made.sampler is not None:
            raise UsageError(
                f"mode='partition' assigns ranges of indices, but the loader has a sampler of its"
                f" own ({type(made.sampler).__name__}), which chooses all indices; use"
                " mode='shard', or a sampler over the worker's own indices with presharded=True"
            )
        assert made.units is not None, "without a custom sampler the length is known"
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
        """The settings that determine the parts."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
            "the sampler": type(self._loader.sampler).__name__,
        }

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield batches of this worker's part."""
        own = share(self._samples, data_pass.group.size, self._rank)
        seed = mix_seeds(data_pass.seed, data_pass.epoch, 1 + self._rank)
        order = LocalOrder(len(own), seed if self._is_shuffled else None)
        indices = [own[index] for index in order.units(0, len(own))]
        is_batched = self._loader.batch_size is not None
        shares = (self._parts, self._sizes, self._rank)
        parts = own_parts(
            indices, *shares, steps=self._steps, is_batched=is_batched, data_pass=data_pass
        )
        key = ("partition", *settings_of(self._loader))
        copy = data_pass.record.copy_for(key, lambda: IndexedLoader(self._loader))
        yield from data_pass.track(copy.run(parts, data_pass.announcer, seed))


class FilePartDataset(IterableDataset[Any]):
    """The contents of some files, one after the other; each file is opened by one process."""

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
            for item in self._open(file):
                yield item
                number += 1
        except Exception as error:
            raise UsageError(
                f"pl.shard: {file} could not be read after {number} samples or batches on rank"
                f" {self._rank}: {type(error).__name__}: {error}"
            ) from error


class FileSource:
    """A list of files, each owned by one worker."""

    kind = "files"

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
        self._own = [given.files[index] for index in share(count, workers, group.rank)]
        self.length: int | None = None  # not known before the files are read
        self._loader = self._loader_over(self._own)  # raises UsageError for bad settings

    @property
    def facts(self) -> dict[str, Any]:
        """The names of all files: the parts are ranges of one list."""
        names = "\0".join(map(str, self._given.files))
        return {
            "the number of files": len(self._given.files),
            "the list of files": hashlib.sha256(names.encode()).hexdigest()[:16],
            "batch_size": self._given.settings["batch_size"],
            "shuffle": self._given.is_shuffled,
        }

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield the contents of this worker's files, with as many steps as the other workers."""
        seed = mix_seeds(data_pass.seed, data_pass.epoch, 1 + data_pass.group.rank)
        order = LocalOrder(len(self._own), seed if self._given.is_shuffled else None)
        files = [self._own[index] for index in order.units(0, sys.maxsize)]
        loader = self._loader_over(files)
        loader.generator.manual_seed(seed)
        yield from own_batches(
            data_pass,
            lambda: iter(loader),
            (),
            "its files are empty; give each worker a file with something in it, or pass pad=False",
            stops_short=bool(self._given.settings.get("drop_last")),
        )

    def _loader_over(self, files: Sequence[Any]) -> Any:
        try:
            loader: DataLoader[Any] = DataLoader(
                FilePartDataset(files, self._given.open, self._rank), **self._given.settings
            )
        except (TypeError, ValueError) as error:
            raise UsageError(f"the settings of a loader over files: {error}") from None
        is_batched = loader.batch_size is not None
        return copied(loader, collate_fn=TaggingCollate(loader.collate_fn, is_batched=is_batched))
