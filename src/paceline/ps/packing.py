"""Gradients that go to a server in fewer bytes: a worker's packets, and how they are read.

A codec (compress/) sees what a shard has of each parameter; small pieces, and numbers other than
float32, stay as they are. A push says which codec reads it. That text comes from another process:
it is looked up here among the codecs that there are, and the length of a packet is compared with
what it has to be, before anything is received or read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.compress.codec import Allocate, Codec, Ground, make_codec
from paceline.compress.layout import Layout, plan
from paceline.compress.packet import Contents, Packet
from paceline.compress.parse import CodecSpec, parse_codec
from paceline.errors import ShapeMismatch, UsageError
from paceline.ps import messages as m
from paceline.ps.spec import ShardSpec
from paceline.telemetry.compression import Account

_MOST = 4096  # ways to read packets that are remembered: whoever pushes names the codec
_SHOWN = 80


@dataclass(frozen=True)
class _Segment:
    start: int
    count: int
    shape: torch.Size


def layout_of(spec: ShardSpec, first: int, min_elements: int) -> Layout:
    """Divide a shard into what is compressed and what is not; the same on both ends."""
    pieces = [_Segment(p.start, p.count, torch.Size(p.shape)) for p in spec.pieces]
    return plan(pieces, spec.count, first, min_elements)


class Packing:
    """Makes the packets of one worker."""

    def __init__(
        self, spec: CodecSpec, allocate: Allocate, *, worker: int, num_workers: int
    ) -> None:
        self.codec = make_codec(spec)
        self.accounts: list[Account] = []  # what each packet has saved and cost
        self._allocate, self._worker, self._num_workers = allocate, worker, num_workers

    def packet(self, spec: ShardSpec, first: int) -> Packet | None:
        """Return the packet of a shard, whose first element is that one of the model.

        None: it is too small, or of another dtype, and travels as it is.
        """
        layout = layout_of(spec, first, self.codec.spec.min_elements)
        if spec.dtype != "float32" or not layout.large:
            return None
        ground = Ground(layout, self._allocate, self._worker, num_workers=self._num_workers)
        packet = self.codec.packet(ground)
        self.accounts.append(packet.account)
        return packet


class Unpacking:
    """Reads the packets of all workers for one table, on a server."""

    def __init__(self) -> None:
        self._codecs: dict[str, Codec] = {}
        self._contents: dict[tuple[int, str], Contents] = {}  # by shard and codec

    def contents(self, number: int, spec: ShardSpec, push: m.Push) -> Contents:
        """Say what a push has in it; an error says why it cannot be."""
        found = self._contents.get((number, push.codec))
        if found is None:
            found = self._make(spec, push.codec)
            if len(self._contents) >= _MOST:
                self._contents.clear()
            self._contents[number, push.codec] = found
        if push.num_bytes != found.num_bytes:
            raise ShapeMismatch(
                f"shard {spec.label!r} has {spec.count} x {spec.dtype}, which codec"
                f" {push.codec[:_SHOWN]} makes {found.num_bytes} bytes of, but the push has"
                f" {push.num_bytes}; do all processes run the same version of Paceline?"
            )
        return found

    def _make(self, spec: ShardSpec, text: str) -> Contents:
        if text not in self._codecs:
            parsed = parse_codec(text)
            if parsed.why_no_servers:
                raise UsageError(f"codec {text[:_SHOWN]}: {parsed.why_no_servers}")
            if len(self._codecs) >= _MOST:
                self._codecs.clear()
            self._codecs[text] = make_codec(parsed)
        layout = layout_of(spec, 0, self._codecs[text].spec.min_elements)
        if spec.dtype != "float32" or not layout.large:
            raise ShapeMismatch(
                f"shard {spec.label!r} has {spec.count} x {spec.dtype}, of which codec"
                f" {text[:_SHOWN]} takes nothing; push it as it is"
            )
        return Contents(self._codecs[text], layout)


def unpack(
    contents: Contents, spec: ShardSpec, push: m.Push, payload: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write the numbers of a packet to `out`; zeros where a worker has no gradient."""
    contents.read(payload, out)
    for piece in spec.pieces if push.absent else ():
        if piece.param in push.absent:
            out[piece.start : piece.start + piece.count].zero_()
    return out
