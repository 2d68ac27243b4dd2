"""Codecs with fewer bits per number, in blocks of a fixed size (blocks.py).

    fp16, bf16   two bytes per number
    int8         256 numbers: their largest absolute value, and a byte for each, rounded to nearest
    int4         512 numbers: the same with four bits, rounded up or down at random, so that the
                 mean over many steps is right (QSGD)
    onebit       2048 numbers: the mean of the positive and of the negative ones, and a sign each
                 (Seide et al. 2014)

SlicedReduction. Payloads can be split between any two blocks, so the workers share the work of
averaging: each worker receives its SLICE of the blocks of all workers (all-to-all), averages them
into one row, and sends the row to all workers (all-gather). Each sends 2 (n - 1) / n of a payload,
as in a ring, and averages only its slice. The rounding error of the row goes into the residual of
the worker that made it.

SharedScalesReduction: int8 with scales that all workers share, summed as bytes on the ring. First,
workers agree on the largest absolute value of each block of 256 numbers (an all-reduce with MAX of
`block_absmax`). Then each worker quantizes its numbers in steps of 1/L of it, with L =
`levels_for(workers)` = 127 / workers, so that sums fit into a byte, and the engine sums bytes. One
byte per number in both directions; the more workers, the coarser. If a block contains a number that
is not finite on any worker, it decodes to NaN on all workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress import blocks
from paceline.compress.codec import Codec, CodecContext, Span
from paceline.compress.kernels import Draw
from paceline.compress.reduction import CompressedReduction
from paceline.compress.registry import CodecSpec
from paceline.runtime.work import Work


class BlockCodec(Codec):
    """A codec with one of the block formats."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.format = blocks.FORMATS[spec.name]

    def num_bytes(self, count: int) -> int:
        return self.format.payload_bytes(count)

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

    def reduction(self, context: CodecContext) -> CompressedReduction:
        if self.spec.text("scales") == "shared":
            return SharedScalesReduction(self, context)
        return SlicedReduction(self, context)


@dataclass(frozen=True)
class _BlockRange(Span):
    """Some consecutive blocks: the range of their numbers, and their positions in a payload."""

    first: int
    last: int  # exclusive


class SlicedReduction(CompressedReduction):
    """A reduction in which each worker averages one slice."""

    codec: BlockCodec

    def __init__(self, codec: BlockCodec, context: CodecContext) -> None:
        super().__init__(codec, context)
        self._num_blocks = sum(codec.format.num_blocks(span.count) for span in self.layout.large)
        self._payload = self._allocate_blocks(self._num_blocks)
        self._result = self._allocate_blocks(self._num_blocks)
        self._rank_and_size = (0, 0)  # of the group that the following slices are for
        self._bounds: list[int] = []
        self._received: Sequence[torch.Tensor] = ()
        # If the exchange may be repeated, the row's error is added to the residual only later.
        self._is_elastic = context.is_elastic
        self._defers = context.is_elastic and self.residual is not None
        self._row_error: torch.Tensor | None = None  # of this worker's slice
        self._has_row_error = False
        self._draw = Draw(0, 0)

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        self._add_row_error()
        at = 0
        for span in self.layout.large:
            length = self.codec.format.num_blocks(span.count)
            residual = None if self.residual is None else span.of(self.residual)
            payload = self._slice(self._payload, at, at + length)
            self.codec.encode(span.of(values), payload, residual, draw.at(span.start))
            at += length
        self._draw = Draw(self.codec.seed, draw.step, draw.first)

    def hop(self, group: Group) -> Work[Any]:
        self._divide(group)
        sent = [self._slice(self._payload, a, b) for a, b in pairwise(self._bounds)]
        work = group.all_to_all(sent, out=self._received, async_op=True)
        assert isinstance(work, Work)
        return work

    def second_hop(self, group: Group) -> None:
        rank, _ = self._rank_and_size
        begin = self._bounds[rank]
        row = self._slice(self._result, begin, self._bounds[rank + 1])
        for own, of_slice in self._own_blocks():
            residual = None if self.residual is None else own.of(self.residual)
            if self._row_error is not None:
                residual = of_slice.of(self._row_error).zero_()
            first, last = own.first - begin, own.last - begin
            blocks.recode(
                self.codec.format.name,
                [self._slice(received, first, last) for received in self._received],
                self._slice(self._result, own.first, own.last),
                count=own.count,
                residual=residual,
                draw=self._draw.at(own.start),
            )
        self._has_row_error = True
        rows = [self._slice(self._result, a, b) for a, b in pairwise(self._bounds)]
        work = group.all_gather(row, out=rows, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work

    def write(self, out: torch.Tensor) -> None:
        at = 0
        for span in self.layout.large:
            length = self.codec.format.num_blocks(span.count)
            self.codec.mean([self._slice(self._result, at, at + length)], span.of(out))
            at += length

    @property
    def payload(self) -> torch.Tensor:
        """This worker's payload of all large spans, one after the other."""
        return self._payload

    @property
    def result(self) -> torch.Tensor:
        """The payload of the mean, after `settle`."""
        return self._result

    @property
    def sent_bytes(self) -> int:
        rank, size = self._rank_and_size
        own = self._bounds[rank + 1] - self._bounds[rank]
        return (self._num_blocks - own + own * (size - 1)) * self.codec.format.num_bytes

    def left_out(self) -> torch.Tensor | None:
        self._add_row_error()
        return self.residual

    def forget(self) -> None:
        super().forget()
        self._has_row_error = False

    def own(self) -> Iterator[torch.Tensor]:
        if not self._is_elastic:
            self._add_row_error()
        yield from super().own()

    # -- a residual on a device (pace/through_host/encoded.py) ------------------------------------

    def move_residual(self, device: torch.device) -> None:
        """Keep the residual on a device; the error of each row stays on the host until it is
        taken."""
        if self.residual is not None:
            self.residual, self._defers = self.residual.to(device), True

    def take_row_error(self) -> torch.Tensor | None:
        """Return the error of the last row, if it is not in the residual yet; it is to be added by
        `add_row_error`."""
        found = self._row_error if self._has_row_error else None
        self._has_row_error = False
        return found

    def add_row_error(self, error: torch.Tensor) -> None:
        """Add the error of a row to the residual."""
        if self.residual is not None:
            for own, of_slice in self._own_blocks():
                own.of(self.residual).add_(of_slice.of(error))

    def _add_row_error(self) -> None:
        """Add the error of the last row to the residual: the last exchange will not be repeated."""
        error = self.take_row_error()
        if error is not None and self.residual is not None:
            self.add_row_error(error.to(self.residual.device))

    def _divide(self, group: Group) -> None:
        """Divide the blocks into slices again if the group has changed."""
        if self._rank_and_size == (group.rank, group.size):
            return
        self._rank_and_size = (group.rank, group.size)
        each, more = divmod(self._num_blocks, group.size)
        self._bounds = [each * part + min(part, more) for part in range(group.size + 1)]
        own = self._bounds[group.rank + 1] - self._bounds[group.rank]
        memory = self._allocate_blocks(own * group.size)
        self._received = [self._slice(memory, n * own, (n + 1) * own) for n in range(group.size)]
        self._has_row_error = False
        if self._defers:
            count = sum(blocks.count for blocks, _ in self._own_blocks())
            self._row_error = self.allocate(count, torch.float32)

    def _own_blocks(self) -> Iterator[tuple[_BlockRange, Span]]:
        """Yield the blocks that this worker averages, split where spans end; with their position in
        this worker's slice."""
        rank, _ = self._rank_and_size
        begin, end = self._bounds[rank], self._bounds[rank + 1]
        at, width, passed = 0, self.codec.format.values, 0
        for span in self.layout.large:
            length = self.codec.format.num_blocks(span.count)
            first, last = max(begin, at), min(end, at + length)
            if first < last:
                start = (first - at) * width
                count = min(span.count, (last - at) * width) - start
                yield _BlockRange(span.start + start, count, first, last), Span(passed, count)
                passed += count
            at += length

    def _allocate_blocks(self, num_blocks: int) -> torch.Tensor:
        return self.allocate(num_blocks * self.codec.format.num_bytes, torch.uint8)

    def _slice(self, payload: torch.Tensor, first: int, last: int) -> torch.Tensor:
        size = self.codec.format.num_bytes
        return payload[first * size : last * size]


class SharedScalesReduction(CompressedReduction):
    """A reduction that sums int8 with common scales."""

    def __init__(self, codec: Codec, context: CodecContext) -> None:
        super().__init__(codec, context)
        self._blocks = [blocks.num_shared_blocks(span.count) for span in self.layout.large]
        count = sum(span.count for span in self.layout.large)
        self._sizes = context.allocate(sum(self._blocks), torch.float32)
        self._agreed = context.allocate(sum(self._blocks), torch.float32)
        self._bytes = context.allocate(count, torch.int8)
        self._sums = context.allocate(count, torch.int8)
        self._values: torch.Tensor | None = None  # quantized in the second hop
        # The residual before the exchange, if the exchange may be repeated.
        is_kept = context.is_elastic and self.residual is not None
        self._residual_before = torch.zeros(self.layout.size) if is_kept else None
        self._num_workers = 1

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        del draw
        self._values = values
        if self._residual_before is not None and self.residual is not None:
            self._residual_before.copy_(self.residual)
        for span, sizes in zip(self.layout.large, self._sizes.split(self._blocks), strict=True):
            blocks.block_absmax(span.of(values), self._left(span), sizes)

    def hop(self, group: Group) -> Work[Any]:
        self._num_workers = group.size
        blocks.levels_for(group.size)  # raises if there are too many workers
        work = group.all_reduce(self._sizes, "max", out=self._agreed, async_op=True)
        assert isinstance(work, Work)
        return work

    def second_hop(self, group: Group) -> None:
        assert self._values is not None
        if self._residual_before is not None and self.residual is not None:
            self.residual.copy_(self._residual_before)
        levels = blocks.levels_for(self._num_workers)
        for span, sizes, part in self._parts(self._bytes):
            left = self._left(span)
            blocks.encode_shared(span.of(self._values), sizes, levels, part, residual=left)
        work = group.all_reduce(self._bytes, "sum", out=self._sums, async_op=True)
        assert isinstance(work, Work)
        self.last_hop = work

    def write(self, out: torch.Tensor) -> None:
        workers = self._num_workers
        levels = blocks.levels_for(workers)
        for span, sizes, part in self._parts(self._sums):
            blocks.decode_shared(part, sizes, levels, workers, span.of(out))

    @property
    def sent_bytes(self) -> int:
        n = self._num_workers
        return (4 * self._sizes.numel() + self._bytes.numel()) * 2 * (n - 1) // n

    def _left(self, span: Span) -> torch.Tensor | None:
        return None if self.residual is None else span.of(self.residual)

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor]]:
        """Yield each span with the scales of its blocks, and its bytes."""
        sizes = self._agreed.split(self._blocks)
        parts = flat.split([span.count for span in self.layout.large])
        return zip(self.layout.large, sizes, parts, strict=True)
