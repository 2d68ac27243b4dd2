"""A journey of one hop: everybody sends all of its payload to everybody, who make the mean.

For payloads that nobody can add up for others, such as chosen values with their places: with n
workers each sends its payload n - 1 times, so it is for few bytes, or few workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.collectives.group import Group
from paceline.compress.codec import Codec, Ground
from paceline.compress.draw import Draw
from paceline.compress.journey import Journey
from paceline.work import Work


class Gathered(Journey):
    """One flat tensor, whose spans' payloads lie one behind the other."""

    def __init__(self, codec: Codec, ground: Ground) -> None:
        super().__init__(codec, ground)
        self._ends = [0]
        self._payload = self._rows_memory = torch.empty(0, dtype=torch.uint8)
        self._rows: Sequence[torch.Tensor] = ()
        self.resize()

    def resize(self) -> None:
        """Make room for what the codec sends from now on; between two journeys only."""
        sizes = [self.codec.num_bytes(span.count) for span in self.layout.large]
        self._ends = [0]
        for size in sizes:
            self._ends.append(self._ends[-1] + -(-size // 4) * 4)  # numbers begin at multiples of 4
        self._payload = self.allocate(self._ends[-1], torch.uint8)
        self._rows = ()

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        for number, span in enumerate(self.layout.large):
            residual = None if self.residual is None else span.of(self.residual)
            payload = self._part(self._payload, number)
            self.codec.encode(span.of(values), payload, residual, draw.at(span.start))

    def hop(self, group: Group) -> Work[Any]:
        if len(self._rows) != group.size:
            size = self._payload.numel()
            self._rows_memory = self.allocate(size * group.size, torch.uint8)
            self._rows = [self._rows_memory[n * size : (n + 1) * size] for n in range(group.size)]
        work = group.all_gather(self._payload, out=self._rows, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work
        return work

    def write(self, out: torch.Tensor) -> None:
        for number, span in enumerate(self.layout.large):
            self.codec.mean([self._part(row, number) for row in self._rows], span.of(out))

    @property
    def sent_bytes(self) -> int:
        return self._payload.numel() * (len(self._rows) - 1)

    def _part(self, row: torch.Tensor, number: int) -> torch.Tensor:
        begin = self._ends[number]
        return row[begin : begin + self.codec.num_bytes(self.layout.large[number].count)]
