"""Codecs that turn each block of numbers into as many bytes, wherever it lies.

    fp16, bf16   two bytes for each
    int8         256 numbers: their largest size, and a byte for each, rounded to nearest
    int4         512 numbers: the same with four bits, rounded up or down by chance, so that the
                 mean over many steps is right (QSGD)
    onebit       2048 numbers: the mean of those above zero and of those below, and a sign for each
                 (Seide et al. 2014)

Payloads can be cut between any two blocks, so the workers share the work of adding up: each is sent
its SLICE of everybody's blocks (all-to-all), makes one row of them, and tells all (all-gather).
That is what a ring sends, 2 (n - 1) / n of a payload; nobody adds up more than its slice. What the
one row leaves out of the mean goes into the residual of who made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress import blocks
from paceline.compress.codec import Codec, Ground
from paceline.compress.journey import Journey
from paceline.compress.kernels import Draw
from paceline.compress.layout import Span
from paceline.compress.parse import CodecSpec
from paceline.runtime.work import Work


class Blocks(Codec):
    """A format of blocks (blocks.py)."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.format = blocks.FORMATS[spec.name]

    def num_bytes(self, count: int) -> int:
        return self.format.payload_bytes(count)

    def num_blocks(self, count: int) -> int:
        """Return how many blocks so many numbers are; the last one may not be full."""
        return self.format.num_blocks(count)

    def encode(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        residual: torch.Tensor | None,
        draw: Draw,
    ) -> None:
        blocks.encode(self.format.name, values, payload, residual=residual, draw=draw)

    def mean(self, payloads: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        blocks.mean(self.format.name, payloads, out)

    def journey(self, ground: Ground) -> Journey:
        if self.spec.text("scales") == "shared":
            from paceline.compress.shared_scales import SharedScales

            return SharedScales(self, ground)
        return Sliced(self, ground)


@dataclass(frozen=True)
class _Piece(Span):
    """Some blocks: the numbers they stand for, and where they are in a payload."""

    first: int
    last: int


class Sliced(Journey):
    """One flat tensor, added up in slices."""

    codec: Blocks

    def __init__(self, codec: Blocks, ground: Ground) -> None:
        super().__init__(codec, ground)
        self._num_blocks = sum(codec.num_blocks(span.count) for span in self.layout.large)
        self._payload = self._bytes(self._num_blocks)
        self._result = self._bytes(self._num_blocks)
        self._seats = (0, 0)  # rank and size of the group whose slices the following are of
        self._bounds: list[int] = []
        self._heard: Sequence[torch.Tensor] = ()
        # What the row leaves out is not the residual's yet: the exchange may be repeated.
        is_late = ground.is_elastic and self.residual is not None
        self._owed = torch.zeros(self.layout.size) if is_late else None
        self._owes = False
        self._draw = Draw(0, 0)

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        self._settle()
        at = 0
        for span in self.layout.large:
            length = self.codec.num_blocks(span.count)
            residual = None if self.residual is None else span.of(self.residual)
            payload = self._cut(self._payload, at, at + length)
            self.codec.encode(span.of(values), payload, residual, draw.at(span.start))
            at += length
        self._draw = Draw(self.codec.seed, draw.step, draw.first)

    def hop(self, group: Group) -> Work[Any]:
        self._sit(group)
        pairs = list(zip(self._bounds, self._bounds[1:], strict=False))
        sent = [self._cut(self._payload, a, b) for a, b in pairs]
        work = group.all_to_all(sent, out=self._heard, async_op=True)
        assert isinstance(work, Work)
        return work

    def second_hop(self, group: Group) -> None:
        rank, _ = self._seats
        begin = self._bounds[rank]
        told = self._cut(self._result, begin, self._bounds[rank + 1])
        for piece in self._mine():
            residual = self.residual
            if self._owed is not None:
                piece.of(self._owed).zero_()
                residual = self._owed
            rows = [self._cut(row, piece.first - begin, piece.last - begin) for row in self._heard]
            blocks.recode(
                self.codec.format.name,
                rows,
                self._cut(self._result, piece.first, piece.last),
                count=piece.count,
                residual=None if residual is None else piece.of(residual),
                draw=self._draw.at(piece.start),
            )
        self._owes = True
        pairs = zip(self._bounds, self._bounds[1:], strict=False)
        parts = [self._cut(self._result, a, b) for a, b in pairs]
        work = group.all_gather(told, out=parts, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work

    def write(self, out: torch.Tensor) -> None:
        at = 0
        for span in self.layout.large:
            length = self.codec.num_blocks(span.count)
            self.codec.mean([self._cut(self._result, at, at + length)], span.of(out))
            at += length

    @property
    def sent_bytes(self) -> int:
        rank, size = self._seats
        mine = self._bounds[rank + 1] - self._bounds[rank]
        return (self._num_blocks - mine + mine * (size - 1)) * self.codec.format.num_bytes

    def left_out(self) -> torch.Tensor | None:
        self._settle()
        return self.residual

    def forget(self) -> None:
        super().forget()
        self._owes = False

    def _settle(self) -> None:
        """The last exchange stands: what its row has left out is this worker's to send."""
        if self._owes and self._owed is not None and self.residual is not None:
            for piece in self._mine():
                piece.of(self.residual).add_(piece.of(self._owed))
        self._owes = False

    def _sit(self, group: Group) -> None:
        """Cut the slices anew if other workers are there than last time."""
        if self._seats == (group.rank, group.size):
            return
        self._seats = (group.rank, group.size)
        each, more = divmod(self._num_blocks, group.size)
        self._bounds = [each * part + min(part, more) for part in range(group.size + 1)]
        mine = self._bounds[group.rank + 1] - self._bounds[group.rank]
        heard = self._bytes(mine * group.size)
        self._heard = [self._cut(heard, n * mine, (n + 1) * mine) for n in range(group.size)]

    def _mine(self) -> Iterator[_Piece]:
        """The blocks that this worker adds up, cut where spans end."""
        rank, _ = self._seats
        begin, end = self._bounds[rank], self._bounds[rank + 1]
        at, width = 0, self.codec.format.values
        for span in self.layout.large:
            length = self.codec.num_blocks(span.count)
            first, last = max(begin, at), min(end, at + length)
            if first < last:
                start = (first - at) * width
                count = min(span.count, (last - at) * width) - start
                yield _Piece(span.start + start, count, first, last)
            at += length

    def _bytes(self, num_blocks: int) -> torch.Tensor:
        return self.allocate(num_blocks * self.codec.format.num_bytes, torch.uint8)

    def _cut(self, payload: torch.Tensor, first: int, last: int) -> torch.Tensor:
        size = self.codec.format.num_bytes
        return payload[first * size : last * size]
