"""Packet: the message to a server in place of one flat tensor, and how the server reads it.

    payload of each large span, at multiples of 4 bytes | small tensors, uncompressed

Its size follows from the codec and the layout, so both ends know it before anything is sent. A
worker fills a packet once per step: if a server was lost, the worker sends the same bytes again,
and adds nothing to the residual a second time.

A tensor that is ABSENT (it has no gradient in this step) is not sent: its residual stays as it is,
and the reader of the packet must treat its values as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from paceline.compress.codec import Codec, CodecContext, Layout, Span
from paceline.compress.kernels import Draw
from paceline.compress.reduction import MEASURE_EVERY
from paceline.observe.telemetry.traffic import CodecStats


class PacketFormat:
    """The positions of payloads and small tensors in the packets of one codec and one layout."""

    def __init__(self, codec: Codec, layout: Layout) -> None:
        self.codec, self._layout = codec, layout
        self._ends = [0]
        for span in layout.large:
            size = codec.num_bytes(span.count)
            self._ends.append(self._ends[-1] + -(-size // 4) * 4)
        self.num_bytes = self._ends[-1] + 4 * layout.num_small
        spans = (*layout.large, *layout.small)
        covered = sorted((span.start, span.start + span.count) for span in spans)
        pairs = pairwise([(0, 0), *covered, (layout.size, layout.size)])
        self._gaps = [Span(stop, start - stop) for (_, stop), (start, _) in pairs if stop < start]

    def part(self, payload: torch.Tensor, number: int) -> torch.Tensor:
        """Return the payload of a large span."""
        begin = self._ends[number]
        return payload[begin : begin + self.codec.num_bytes(self._layout.large[number].count)]

    def small(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the numbers of all small tensors, one after the other."""
        return payload[self._ends[-1] : self.num_bytes].view(torch.float32)

    def read(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers of a packet to `out`, and zeros between the tensors."""
        for number, span in enumerate(self._layout.large):
            self.codec.mean([self.part(payload, number)], span.of(out))
        self._layout.unpack_small(self.small(payload), out)
        for span in self._gaps:
            span.of(out).zero_()


class Packet:
    """The message of one worker to one server for one flat tensor. Main thread only."""

    def __init__(self, codec: Codec, context: CodecContext) -> None:
        self.codec, self.layout = codec, context.layout
        self.residual = torch.zeros(self.layout.size) if codec.has_feedback else None
        self.account = CodecStats()
        self.contents = PacketFormat(codec, self.layout)
        self._allocate, self._rank = context.allocate, context.rank
        self.payload = self._allocate(self.contents.num_bytes, torch.uint8)
        self.key: int | None = None  # of the step whose values it contains
        self.num_filled = 0

    @property
    def form(self) -> str:
        """The text of the codec that decodes it."""
        return str(self.codec.spec)

    def fill(self, values: torch.Tensor, key: int, absent: Sequence[Span] = ()) -> None:
        """Encode these values, unless the packet already contains the values of this key."""
        if key == self.key:
            return
        self.key = key
        with self.account.timed():
            wanted = 0.0
            if self.residual is not None and self.num_filled % MEASURE_EVERY == 0:
                wanted = self.layout.wanted_size(values, self.residual)
            kept = [(span.of(flat), span.of(flat).clone()) for flat in self.kept for span in absent]
            for memory, _ in kept:
                memory.zero_()
            seed = self.codec.seed + 1 + self._rank
            self.encode(values, Draw(seed, self.num_filled, self.layout.first))
            for memory, before in kept:
                memory.copy_(before)
            self.layout.pack_small(values, self.contents.small(self.payload))
            self.num_filled += 1
            if wanted and self.residual is not None:
                self.account.add_error(float(torch.linalg.vector_norm(self.residual)) / wanted)
        self.account.add_sent(4 * self.layout.size, self.contents.num_bytes)

    @property
    def kept(self) -> Sequence[torch.Tensor]:
        """The flat tensors that this worker keeps from step to step."""
        return () if self.residual is None else (self.residual,)

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        """Write the payloads of all large spans."""
        for number, span in enumerate(self.layout.large):
            residual = None if self.residual is None else span.of(self.residual)
            payload = self.contents.part(self.payload, number)
            self.codec.encode(span.of(values), payload, residual, draw.at(span.start))

    def resize(self, codec: Codec) -> None:
        """Allocate a payload of the size that this codec writes from now on."""
        self.contents = PacketFormat(codec, self.layout)
        self.payload = self._allocate(self.contents.num_bytes, torch.uint8)
