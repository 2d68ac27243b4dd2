"""Gradients and averages that travel in fewer bytes: how packets are made and read.

A codec (compress/) sees what a shard has of each parameter; small pieces, and numbers other than
float32, stay as they are. A push says which codec reads it. That text comes from another process:
it is looked up here among the registered codecs, and the length of a packet is compared with
what it has to be, before anything is received or read.

AVERAGES go back to the workers through a codec too. Nothing is kept from step to step for it, so
only codecs that need no such memory are used:

    topk              the mean of n workers' chosen values has at most n times as many: those are
                      sent, and the mean is what it was
    fp16, bf16, int8  the mean is rounded before any worker gets it: the servers apply what the
                      workers get

With others (int4 and onebit; error feedback; dgc, which sends more at first) averages go as they
are. So they do when a packet would not be less, and from a copy that was filled by another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.compress.codec import Allocate, Codec, CodecContext, Layout, make_codec, plan
from paceline.compress.kernels import Draw
from paceline.compress.packet import Packet, PacketFormat
from paceline.compress.registry import CodecSpec, parse_codec
from paceline.errors import ShapeMismatch, UsageError
from paceline.observe.telemetry.traffic import CodecStats
from paceline.ps import messages as m
from paceline.ps.spec import ShardSpec

_MOST = 4096  # packet formats that are remembered: workers choose the codec
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
        self.accounts: list[CodecStats] = []  # what each packet has saved and cost
        self._allocate, self._worker, self._num_workers = allocate, worker, num_workers

    def packet(self, spec: ShardSpec, first: int) -> Packet | None:
        """Return the packet of a shard, whose first element has that index in the model.

        None: it is too small, or of another dtype, and is not packed.
        """
        layout = layout_of(spec, first, self.codec.spec.min_elements)
        if spec.dtype != "float32" or not layout.large:
            return None
        context = CodecContext(layout, self._allocate, self._worker, num_workers=self._num_workers)
        packet = self.codec.packet(context)
        self.accounts.append(packet.account)
        return packet


class Unpacking:
    """Reads the packets of all workers for one table, on a server."""

    def __init__(self) -> None:
        self._codecs: dict[str, Codec] = {}
        self._contents: dict[tuple[int, str], PacketFormat] = {}  # by shard and codec

    def contents(self, number: int, spec: ShardSpec, push: m.Push) -> PacketFormat:
        """Return what a push has in it; an error says why it cannot be."""
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

    def _make(self, spec: ShardSpec, text: str) -> PacketFormat:
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
                f" {text[:_SHOWN]} packs nothing; push it unpacked"
            )
        return PacketFormat(self._codecs[text], layout)


def unpack(
    contents: PacketFormat, spec: ShardSpec, push: m.Push, payload: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write the numbers of a packet to `out`; zeros where a worker has no gradient."""
    contents.read(payload, out)
    for piece in spec.pieces if push.absent else ():
        if piece.param in push.absent:
            out[piece.start : piece.start + piece.count].zero_()
    return out


_ROUNDED = ("fp16", "bf16", "int8")
_WORTH = 0.75  # of the bytes of the numbers themselves; else it is not worth the work


def mean_codec_of(spec: CodecSpec) -> str:
    """Return the codec that averages go through when gradients go through this one; or ""."""
    if spec.name == "topk":
        return str(CodecSpec("topk", spec.value, _small(spec)))
    has_feedback = spec.is_chosen("feedback")
    is_rounded = spec.name in _ROUNDED and not has_feedback
    return str(CodecSpec(spec.name, None, _small(spec))) if is_rounded else ""


def can_send_means(text: str) -> bool:
    """Return whether it is a text that `mean_codec_of` returns; UsageError if it is none at all."""
    return mean_codec_of(parse_codec(text)) == text


def _small(spec: CodecSpec) -> dict[str, str]:
    return {key: value for key, value in spec.options.items() if key == "min"}


class MeanPackets:
    """Makes the packets of one shard's averages, on a server, and reads them, on a worker."""

    def __init__(self, shard: ShardSpec, text: str) -> None:
        self._spec = parse_codec(text)
        self._layout: Layout = layout_of(shard, 0, self._spec.min_elements)
        self.is_used = shard.dtype == "float32" and bool(self._layout.large)
        self.is_exact = self._spec.name == "topk"
        self._contents: dict[str, PacketFormat] = {}

    def contents(self, text: str) -> PacketFormat:
        """Return how packets of a codec are read."""
        if text not in self._contents:
            self._contents[text] = PacketFormat(make_codec(parse_codec(text)), self._layout)
        return self._contents[text]

    def pack(self, average: torch.Tensor, num_workers: int) -> tuple[str, torch.Tensor] | None:
        """Return codec and packet of an average, which is rounded to it; None: it is not packed."""
        form = self._form(num_workers)
        contents = self.contents(str(form))
        if contents.num_bytes > _WORTH * average.nbytes:
            return None
        codec = contents.codec
        packet = torch.empty(contents.num_bytes, dtype=torch.uint8)  # the last may be under way
        for number, span in enumerate(self._layout.large):
            values, part = span.of(average), contents.part(packet, number)
            codec.encode(values, part, None, Draw(0, 0))
            read = torch.empty_like(values)
            codec.decode(part, read)
            if not self.is_exact:
                values.copy_(read)
            elif not _are_same(values, read):
                return None  # a worker has sent more values than expected
        self._layout.pack_small(average, contents.small(packet))
        return str(form), packet

    def _form(self, num_workers: int) -> CodecSpec:
        if not self.is_exact:
            return self._spec
        share = min(1.0, num_workers * self._spec.value)
        return CodecSpec("topk", share, self._spec.options)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())
