"""Averages that go back to the workers in fewer bytes.

Nothing is kept from step to step for it, so only codecs that need no such memory are used here:

    topk              the mean of n workers' chosen values has at most n times as many: those are
                      sent, and the mean is what it was
    fp16, bf16, int8  the mean is rounded, before anybody has seen it: the servers apply what the
                      workers get

With others (int4 and onebit; error feedback; dgc, which sends more at first) averages go as they
are. So they do when a packet would not be less, and from a copy that was filled by another one.
"""

from __future__ import annotations

import torch

from paceline.compress.codec import make_codec
from paceline.compress.draw import Draw
from paceline.compress.layout import Layout
from paceline.compress.packet import Contents
from paceline.compress.parse import CodecSpec, parse_codec
from paceline.ps.packing import layout_of
from paceline.ps.spec import ShardSpec

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
    """Say whether it is a text that `mean_codec_of` returns; UsageError if it is none at all."""
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
        self._contents: dict[str, Contents] = {}

    def contents(self, text: str) -> Contents:
        """Return how packets of a codec are read."""
        if text not in self._contents:
            self._contents[text] = Contents(make_codec(parse_codec(text)), self._layout)
        return self._contents[text]

    def pack(self, average: torch.Tensor, num_workers: int) -> tuple[str, torch.Tensor] | None:
        """Return codec and packet of an average, which it then is to the bit; None: as it is."""
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
                return None  # somebody has sent more than was thought
        at, small = 0, contents.small(packet)
        for span in self._layout.small:
            small[at : at + span.count].copy_(span.of(average))
            at += span.count
        return str(form), packet

    def _form(self, num_workers: int) -> CodecSpec:
        if not self.is_exact:
            return self._spec
        share = min(1.0, num_workers * self._spec.value)
        return CodecSpec("topk", share, self._spec.options)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())
