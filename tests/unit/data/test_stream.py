"""Streams: how many samples a batch has, and a strided dataset that is still the user's own."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch.utils.data import IterableDataset

from paceline.data.sources.samples import samples_in
from paceline.data.sources.stream import StridedDataset


def test_samples_are_counted_by_the_first_dimension() -> None:
    x = torch.zeros(5, 3)
    for batch in (x, (x, 1), {"id": "a", "x": x}, [{"y": [x]}], (torch.tensor(1.0), x), x.numpy()):
        assert samples_in(batch) == 5
    assert samples_in(["a", "b"]) == 2
    assert samples_in(np.float32(1)) == samples_in("abc") == samples_in(None) == 1


class Numbers(IterableDataset):
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self):
        return iter(range(self.start, self.stop))


def test_a_strided_dataset_passes_attributes_on() -> None:
    dataset = Numbers(0, 10)
    strided = StridedDataset(dataset, 3, 1, 6)
    assert list(strided) == [1, 4, 7]
    strided.start = 2
    assert dataset.start == strided.start == 2
    assert list(strided) == [3, 6, 9]
    again = copy.deepcopy(strided)
    again.stop = 4
    assert list(again) == [3] and list(strided) == [3, 6, 9]
