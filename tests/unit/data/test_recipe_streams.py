"""Batches of a stream that are requested by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.randomness import seed_everything
from paceline.data.workers.messages import BatchRequest
from paceline.data.workers.recipe import Readers, StreamEnded


class Counted(IterableDataset):
    begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        for index in range(21):
            yield index, float(torch.rand(()))


def request(place: int, rank: int = 0, epoch: int = 0) -> BatchRequest:
    return BatchRequest(1, 0, "", epoch, seed=5, stream=(2, rank, 6), place=place)


def taken(readers: Readers, *requests: BatchRequest) -> list[list[Any]]:
    return [readers.take(one) for one in requests]


def test_each_trainer_gets_its_share_in_any_order_of_requests() -> None:
    data = Counted()
    readers = Readers(DataLoader(data, 3))
    first = taken(readers, request(0), request(2), request(1), request(3))
    other = taken(readers, request(0, rank=1))
    assert [[index for index, _ in samples] for samples in first] == [
        [0, 2, 4],
        [12, 14, 16],
        [6, 8, 10],
        [18, 20],
    ]
    assert [index for index, _ in other[0]] == [1, 3, 5] and data.begun == 2
    for place in (4, 5, 4):
        with pytest.raises(StreamEnded):
            readers.take(request(place))
    assert data.begun == 2, "nothing was read again"


def test_a_stream_that_is_read_again_has_the_same_random_numbers() -> None:
    readers, others = Readers(DataLoader(Counted(), 3)), Readers(DataLoader(Counted(), 3))
    once = taken(readers, request(0), request(1), request(0, epoch=1), request(0, rank=1))
    seed_everything(99)
    torch.rand(7)
    assert taken(others, request(1)) == once[1:2], "by a data worker that takes over"
    assert taken(others, request(0)) == once[:1], "and begins again"
    assert taken(readers, request(0), request(1)) == once[:2], "in the next pass of the same epoch"
    drawn = torch.rand(())
    seed_everything(99)
    torch.rand(7)
    assert torch.equal(torch.rand(()), drawn), "the process's own generators are left alone"


def test_the_short_end_may_be_dropped_and_batches_need_not_be() -> None:
    readers = Readers(DataLoader(Counted(), 3, drop_last=True))
    assert len(readers.take(request(2))) == 3
    with pytest.raises(StreamEnded):
        readers.take(request(3))
    single = Readers(DataLoader(Counted(), None))
    assert single.take(request(4))[0] == 8
