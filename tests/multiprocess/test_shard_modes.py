"""pl.shard in modes partition and replicate, datasets, files: what each worker gets and opens."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

import paceline as pl
from paceline.comm.group import Group
from paceline.data.split.partition import FilePartDataset
from paceline.runtime import job
from support import run_ranks

Weighed = list[tuple[list[int], float]]


def weighed(sharded: Any) -> Weighed:
    """Run one pass; every batch with the weight that held while it was handed out."""
    contribution = job.current().contribution
    taken = [(torch.as_tensor(batch).flatten().tolist(), contribution.weight) for batch in sharded]
    assert contribution.weight == 1.0
    return taken


def samples(passed: Weighed) -> list[int]:
    return list(chain.from_iterable(batch for batch, weight in passed if weight))


class Asked(Dataset):
    """Notes which samples it was asked for; variable lengths, so that collating pads."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, set[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.add(index)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


def padded(batch: list[int]) -> torch.Tensor:
    """Rows of different lengths, filled up; the first column is the sample."""
    longest = max(index % 3 + 1 for index in batch)
    rows = torch.full((len(batch), longest), -1)
    for row, index in zip(rows, batch, strict=True):
        row[: index % 3 + 1] = index
    return rows


@pytest.mark.parametrize("world_size", [1, 3])
def test_parts_stay_with_their_worker(world_size: int) -> None:
    def battery(group: Group) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for length, size, drop in [(20, 2, False), (20, 2, True), (19, 3, False), (7, 4, False)]:
            data = Asked(length)
            loader = DataLoader(data, size, shuffle=True, drop_last=drop)
            sharded = pl.shard(loader, mode="partition", seed=3)
            passes = [weighed(sharded) for _ in range(3)]
            assert all(len(one) == len(sharded) for one in passes)
            short = pl.shard(DataLoader(data, size), mode="partition", pad=False)
            mine = weighed(short)
            assert len(short) == len(mine)
            found[length, size, drop] = (passes, mine, sorted(data.asked))
        ragged = DataLoader(Asked(14), 2, collate_fn=padded)
        found["padded"] = [batch[:, 0].tolist() for batch in pl.shard(ragged, mode="partition")]
        found["global"] = weighed(
            pl.shard(DataLoader(range(21), 7), mode="partition", batch="global")
        )
        singles = DataLoader(range(9), batch_size=None)
        found["singles"] = weighed(pl.shard(singles, mode="partition"))
        forked = DataLoader(range(12), 2, num_workers=1)
        found["forked"] = weighed(pl.shard(forked, mode="partition"))
        return found

    ranks = run_ranks(world_size, battery)
    for case in [(20, 2, False), (20, 2, True), (19, 3, False), (7, 4, False)]:
        length, size, drop = case
        owned = [set(rank[case][2]) for rank in ranks]
        assert sorted(chain.from_iterable(owned)) == list(range(length)), "disjoint and complete"
        assert all(sorted(o) == list(range(min(o), max(o) + 1)) for o in owned), "contiguous"
        for epoch in range(3):
            passes = [rank[case][0][epoch] for rank in ranks]
            assert len({len(one) for one in passes}) == 1, "all make the same number of steps"
            for step in zip(*passes, strict=True):
                assert sum(weight for _, weight in step) == pytest.approx(world_size)
                total = sum(len(batch) for batch, weight in step if weight)
                for batch, weight in step:
                    assert weight == 0 or weight == pytest.approx(len(batch) * world_size / total)
            for one, own in zip(passes, owned, strict=True):
                assert max(Counter(samples(one)).values()) == 1
                if not drop:
                    assert set(samples(one)) == own
        orders = [[samples(one) for one in rank[case][0]] for rank in ranks]
        assert all(order[0] != order[1] for order in orders if len(order[0]) > 5), "reshuffled"
        assert sorted(chain.from_iterable(samples(rank[case][1]) for rank in ranks)) == list(
            range(length)
        )
    for kind, count in [("global", 21), ("singles", 9), ("forked", 12)]:
        assert sorted(chain.from_iterable(samples(rank[kind]) for rank in ranks)) == list(
            range(count)
        )
    assert sorted(set(chain(*chain(*(rank["padded"] for rank in ranks))))) == list(range(14))


class Own(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count, self.epochs = count, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        generator = torch.Generator().manual_seed(pl.rank())
        return iter(torch.randperm(self.count, generator=generator).tolist())


class Liar(Own):
    def __len__(self) -> int:
        return self.count + 5


@pytest.mark.parametrize("world_size", [1, 3])
def test_everyone_goes_over_everything(world_size: int) -> None:
    def battery(group: Group) -> dict[str, Any]:
        loader = DataLoader(range(23), 4, shuffle=True)
        sharded = pl.shard(loader, mode="replicate", seed=1)
        found: dict[str, Any] = {"plain": [weighed(sharded), weighed(sharded)]}
        assert len(sharded) == 6
        own = Own(23)
        found["sampler"] = weighed(
            pl.shard(DataLoader(range(23), 4, sampler=own), mode="replicate")
        )
        assert own.epochs == [0]
        batches = BatchSampler(Own(23), 5, drop_last=True)
        found["batches"] = weighed(
            pl.shard(DataLoader(range(23), batch_sampler=batches), mode="replicate")
        )
        with pytest.raises(
            pl.errors.UsageError, match="gave 23 batches, expected 28 by its length"
        ):
            lies = DataLoader(range(23), batch_size=None, sampler=Liar(23))
            list(pl.shard(lies, mode="replicate"))
        return found

    ranks = run_ranks(world_size, battery)
    for rank in ranks:
        for passed in (*rank["plain"], rank["sampler"], rank["batches"]):
            assert {weight for _, weight in passed} == {1.0}
        assert all(sorted(samples(one)) == list(range(23)) for one in rank["plain"])
        assert [len(batch) for batch, _ in rank["plain"][0]] == [4, 4, 4, 4, 4, 3]
        assert sorted(samples(rank["sampler"])) == list(range(23))
        assert [len(batch) for batch, _ in rank["batches"]] == [5, 5, 5, 5]
    orders = [tuple(samples(one)) for rank in ranks for one in rank["plain"]]
    assert len(set(orders)) == 2 * world_size, "another order for each worker and epoch"


def test_datasets_take_the_place_of_loaders() -> None:
    def battery(group: Group) -> list[Any]:
        torch.manual_seed(7)
        data = Asked(24)
        epochs = [weighed(pl.shard(data, batch_size=2, shuffle=True)) for _ in range(2)]
        again = weighed(pl.shard(data, batch_size=2, shuffle=True, epoch=0))
        assert again == epochs[0] != epochs[1], "each call continues to count"
        loader = DataLoader(Asked(24), 2, shuffle=True)
        assert weighed(pl.shard(loader)) == epochs[0], "as with a loader"
        stream = pl.shard(Stream(), batch_size=2)
        return [epochs, weighed(stream)]

    ranks = run_ranks(2, battery)
    for epoch in range(2):
        seen = sorted(chain.from_iterable(samples(rank[0][epoch]) for rank in ranks))
        assert seen == list(range(24))
    assert sorted(chain.from_iterable(samples(rank[1]) for rank in ranks)) == list(range(9))


def test_each_worker_opens_its_own_files_only(tmp_path: Path) -> None:
    lengths = [5, 1, 4, 2, 3, 6, 2]
    files, first = [], 0
    for number, length in enumerate(lengths):
        path = tmp_path / f"part-{number}.txt"
        path.write_text("\n".join(map(str, range(first, first + length))))
        files.append(str(path))
        first += length

    def battery(group: Group, files: list[str], first: int) -> dict[str, Any]:
        opened: list[str] = []

        def read(path: str):
            opened.append(path)
            return map(int, Path(path).read_text().split())

        def read_batch(path: str):
            yield torch.tensor(list(read(path)))

        found: dict[str, Any] = {}
        settings: dict[str, Any] = {"mode": "partition", "open": read}
        sharded = pl.shard(files, batch_size=3, shuffle=True, **settings)
        found["epochs"] = [weighed(sharded) for _ in range(3)]
        found["opened"] = opened[:]
        opened.clear()
        found["again"] = weighed(pl.shard(files, batch_size=3, shuffle=True, **settings))
        found["batches"] = weighed(pl.shard(files, mode="partition", open=read_batch))
        forked = pl.shard(files, batch_size=3, num_workers=2, **settings)
        found["forked"] = weighed(forked)
        opened.clear()
        found["unpadded"] = weighed(pl.shard(files[:2], batch_size=3, pad=False, **settings))

        def refuse(pattern: str, given: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.UsageError, match=pattern):
                list(pl.shard(given, **options))

        refuse("2 files for 3 workers, fewer than one each", files[:2], **settings)
        refuse("the list of files is empty", [], **settings)
        refuse("found the single name", files[0], **settings)
        refuse("expected a function that reads", files, mode="partition", open="r")
        refuse("goes with mode='partition'", files, open=read)
        refuse("unexpected keyword argument 'batchsize'", files, batchsize=3, **settings)
        refuse("persistent_workers=True", files, persistent_workers=True, **settings)

        def stumble(path: str):
            yield 1
            if group.rank == 2 and path == files[6]:
                raise OSError("the disk is gone")

        if group.rank == 2:  # the other workers have one sample in each file, and would wait
            with pytest.raises(
                pl.errors.UsageError, match="6.txt could not be read after 1 .* on rank 2: OSError"
            ):
                list(FilePartDataset(files[5:], stumble, 2))
        mine = files if group.rank else files[::-1]
        refuse("the list of files is .* on rank 1", mine, **settings)
        return found

    ranks = run_ranks(3, battery, files, first)
    everything = list(range(first))
    opened = [rank["opened"] for rank in ranks]
    assert [sorted(set(o)) for o in opened] == [files[:3], files[3:5], files[5:]]
    assert all(set(Counter(o).values()) == {3} for o in opened), "once in each epoch"
    assert any(o[:3] != o[3:6] for o in opened), "in another order"
    for passes in zip(*(rank["epochs"] for rank in ranks), strict=True):
        assert sorted(chain.from_iterable(map(samples, passes))) == everything
        assert len({len(one) for one in passes}) == 1
        for step in zip(*passes, strict=True):
            assert sum(weight for _, weight in step) == pytest.approx(3)
    for kind in ("again", "batches", "forked"):
        assert sorted(chain.from_iterable(samples(rank[kind]) for rank in ranks)) == everything
    assert [samples(rank["unpadded"]) for rank in ranks] == [[0, 1, 2, 3, 4], [5], []]


def test_what_a_mode_cannot_do_is_refused_on_every_rank() -> None:
    def battery(group: Group) -> None:
        def refuse(pattern: str, given: Any, **options: Any) -> None:
            with pytest.raises(pl.errors.UsageError, match=pattern):
                list(pl.shard(given, **options))

        fine = DataLoader(range(20), 2, shuffle=True)
        refuse("mode must be one of shard, partition", fine, mode="both")
        for mode in ("partition", "replicate"):
            refuse("needs indices, which a stream", DataLoader(Stream(), 2), mode=mode)
            refuse("needs indices, which a list", [torch.ones(2)], mode=mode)
            refuse("presharded=True", fine, mode=mode, presharded=True)
            refuse("data_warmup", fine, mode=mode, warmup=pl.data_warmup(0.5))
        sampled = DataLoader(range(20), 2, sampler=Own(20))
        refuse("sampler of its own", sampled, mode="partition")
        refuse("2 samples for 3 workers", DataLoader(range(2), 2), mode="partition")
        refuse("drops them all", DataLoader(range(4), 2, drop_last=True), mode="partition")
        refuse("shuffle=False, so all would", DataLoader(range(20), 2), mode="replicate")
        refuse("splits no batches", fine, mode="replicate", batch="global")
        refuse(
            "batch_size: pl.shard has no such argument; arguments of a DataLoader",
            fine,
            batch_size=3,
        )
        refuse("without batch_size", Asked(9), num_workers=1)
        refuse("unexpected keyword argument", Asked(9), batch_size=2, shufle=True)
        refuse("is a dataset; pass a DataLoader", Asked(9))
        mode = "shard" if group.rank else "partition"
        refuse("mode is 'shard' on rank 1, expected 'partition'", fine, mode=mode)
        assert len(list(pl.shard(fine))) == 4, "the job can continue"

    run_ranks(3, battery)
