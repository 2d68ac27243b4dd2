"""The script of bench/data_pipeline.py: takes batches as a trainer does, and times them.

    python feed.py dataloader heavy 200 64      a DataLoader with two processes of its own
    paceline run --data-workers 2 feed.py pipeline heavy 200 64

A sample is a picture of 3 x 64 x 64 float32, made from bytes in memory. What that costs:
light     a conversion and a flip
heavy     a blur and noise besides: augmentation is the bottleneck
waiting   sleeps for as long as an augmentation takes, as if every process had a core of its own
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

_WAIT_S = 0.002  # for each sample
_STORED = 512
_WARM = 16  # batches that are not timed: caches, and what was made ahead


class Pictures(Dataset[Any]):
    """Pictures that are made when they are asked for."""

    def __init__(self, cost: str, samples: int) -> None:
        self._cost, self._samples = cost, samples
        shape = (_STORED, 3, 64, 64)
        self._bytes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator())
        self._kernel = torch.full((3, 1, 9, 9), 1 / 81)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self._bytes[index % _STORED].float().div_(255)
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        if self._cost == "heavy":
            picture = torch.nn.functional.conv2d(picture[None], self._kernel, padding=4, groups=3)[
                0
            ]
            picture += 0.01 * torch.randn(3, 64, 64)
        elif self._cost == "waiting":
            time.sleep(_WAIT_S)
        return picture, index % 10


def main() -> None:
    how, cost, batches, batch_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    data = Pictures(cost, (batches + _WARM) * batch_size)
    source: Iterable[Any]
    if how == "dataloader":
        source = DataLoader(data, batch_size, shuffle=True, num_workers=2)
    else:
        import paceline as pl

        pl.init()
        source = pl.shard(DataLoader(data, batch_size, shuffle=True), seed=1, mode="pipeline")
    start_s, check = 0.0, 0.0
    for number, (pictures, _) in enumerate(source):
        if number == _WARM:
            start_s = time.perf_counter()
        check += float(pictures.mean())  # reads all of it
    took_s = time.perf_counter() - start_s
    assert check > 0
    found = {"batches_per_s": batches / took_s, "samples_per_s": batches * batch_size / took_s}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
