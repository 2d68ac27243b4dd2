"""Packets: what is in them is read back, once for each key, and absent tensors keep what waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from paceline.compress.codec import CodecContext, Span, make_codec, plan
from paceline.compress.packet import Packet, PacketFormat
from paceline.compress.registry import parse_codec


@dataclass
class Tensor:
    start: int
    count: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count,))


# A small one between large ones; gaps before, between and after.
TENSORS = (
    Tensor(16, 1500),
    Tensor(1520, 9),
    Tensor(1600, 1024),
    Tensor(2640, 3000),
    Tensor(5700, 1),
)
SIZE = 5710
CODECS = ("fp16", "int8", "int4(feedback=yes)", "onebit", "topk:0.03", "topk:0.03+int8")
DGC = "dgc:0.01(momentum=0.9,warmup=10,min=500)+fp16"


def packet_of(text: str) -> Packet:
    codec = make_codec(parse_codec(text))
    layout = plan(TENSORS, SIZE, 0, codec.spec.min_elements)
    return codec.packet(CodecContext(layout, lambda n, dtype: torch.empty(n, dtype=dtype), 0))


def values(seed: int) -> torch.Tensor:
    flat, drawn = (
        torch.zeros(SIZE),
        torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)),
    )
    for one in TENSORS:
        flat[one.start : one.start + one.count] = drawn[one.start : one.start + one.count]
    return flat


def read(packet: Packet) -> torch.Tensor:
    """Read a packet as another process would: it knows the codec's text and the layout."""
    codec = make_codec(parse_codec(packet.form))
    layout = plan(TENSORS, SIZE, 0, codec.spec.min_elements)
    contents, out = PacketFormat(codec, layout), torch.full((SIZE,), 7.0)
    assert contents.num_bytes == packet.payload.numel() == packet.contents.num_bytes
    contents.read(packet.payload.clone(), out)
    return out


@pytest.mark.parametrize("text", [*CODECS, DGC])
def test_what_is_sent_and_what_waits_are_all_there_is(text: str) -> None:
    packet, sent, given = packet_of(text), torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(12):
        packet.fill(values(step), step)
        sent += read(packet)
        given += values(step)
    large = Span(2640, 3000)
    if packet.residual is not None and "dgc" not in text:
        torch.testing.assert_close(large.of(sent + packet.residual), large.of(given))
    else:
        assert torch.isfinite(sent).all()
    for begin, end in ((0, 16), (1529, 1600), (5640, 5700), (5701, SIZE)):
        assert not sent[begin:end].any(), "there is no tensor"
    if text != "fp16":
        torch.testing.assert_close(sent[1520:1529], given[1520:1529])


@pytest.mark.parametrize("text", [*CODECS, DGC])
def test_a_key_is_packed_once(text: str) -> None:
    packet = packet_of(text)
    packet.fill(values(0), 5)
    sent, kept = packet.payload.clone(), [flat.clone() for flat in packet.kept]
    packet.fill(values(1), 5)
    assert torch.equal(packet.payload, sent)
    assert all(torch.equal(a, b) for a, b in zip(packet.kept, kept, strict=True))
    packet.fill(values(1), 6)
    assert not torch.equal(packet.payload, sent) or packet.payload.numel() != sent.numel()


@pytest.mark.parametrize("text", ["onebit", "topk:0.03", "int4(feedback=yes)", DGC])
def test_what_waits_for_an_absent_tensor_stays(text: str) -> None:
    packet, absent = packet_of(text), Span(1600, 1024)
    packet.fill(values(0), 0)
    waiting = [absent.of(flat).clone() for flat in packet.kept]
    assert all(bool(flat.any()) for flat in waiting)
    without = values(1)
    absent.of(without).zero_()
    packet.fill(without, 1, [absent])
    assert all(torch.equal(absent.of(f), w) for f, w in zip(packet.kept, waiting, strict=True))
