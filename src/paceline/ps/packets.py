"""What goes out and comes in for a table's gradients, on a worker: packets, or numbers as they are.

A shard's packet is filled once for each step, under its key, and then sent as often as it has to
be. Averages come back as the reply says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.compress.layout import Span
from paceline.compress.packet import Packet
from paceline.ps.items import ShardOf
from paceline.ps.means import MeanPackets
from paceline.ps.packing import Packing
from paceline.ps.spec import ShardSpec
from paceline.ps.transit import Incoming, IncomingMean, Outgoing, Packed, Staging


class Packets:
    """The packets of one table. Main thread only."""

    def __init__(self, staging: Staging, packing: Packing | None, mean_codec: str) -> None:
        self._staging, self._packing, self._mean_codec = staging, packing, mean_codec
        self._by_shard: dict[tuple[int, int], tuple[ShardSpec, Packet]] = {}
        self._means: dict[tuple[int, int], MeanPackets] = {}

    def add(self, shard: ShardOf, spec: ShardSpec, first: int) -> None:
        """Look after a shard, whose first element is that one of the table."""
        if self._mean_codec:
            self._means[_key(shard)] = MeanPackets(spec, self._mean_codec)
        packet = self._packing.packet(spec, first) if self._packing is not None else None
        if packet is not None:
            self._by_shard[_key(shard)] = (spec, packet)

    def of(self, shard: ShardOf) -> Packet | None:
        """Return the packet of a shard; None: it travels as it is."""
        return self._by_shard[_key(shard)][1] if _key(shard) in self._by_shard else None

    def outgoing(
        self, shard: ShardOf, grads: torch.Tensor, absent: Sequence[int], key: int | None
    ) -> Outgoing:
        """Get a shard's part of gradients ready to be pushed; key None: as it is."""
        if key is None or _key(shard) not in self._by_shard:
            return Outgoing(shard, grads, self._staging)
        spec, packet = self._by_shard[_key(shard)]
        lacking = [Span(p.start, p.count) for p in spec.pieces if p.param in absent]
        packet.fill(shard.of(grads), key, lacking)
        return Packed(shard, packet)

    def incoming_mean(self, shard: ShardOf, average: torch.Tensor | None) -> Incoming:
        """Say where a shard's part of averages lands; None: nobody wants it."""
        if average is None:
            return Incoming(self._staging, "average", ())
        if not self._mean_codec:
            return Incoming(self._staging, "average", [(shard, shard.of(average))])
        return IncomingMean(self._staging, shard, shard.of(average), self._means[_key(shard)])

    def own(self) -> Iterator[torch.Tensor]:
        """Yield what this worker keeps of each packet from step to step, for a checkpoint."""
        for _, packet in self._by_shard.values():
            yield from packet.kept

    def counts(self) -> list[int]:
        """Return how often each has been filled."""
        return [packet.num_filled for _, packet in self._by_shard.values()]

    def recount(self, counts: Sequence[int]) -> None:
        """Go on from there."""
        for (_, packet), count in zip(self._by_shard.values(), counts, strict=True):
            packet.num_filled = count

    def told(self, shard: ShardOf, grads: torch.Tensor, key: int) -> torch.Tensor:
        """Return what a server was told of a shard in a step, as it sees it."""
        packet, grad = self.of(shard), shard.of(grads)
        if packet is None:
            return grad
        told = torch.zeros_like(grad)
        if packet.key == key:  # else nothing was pushed
            packet.contents.read(packet.payload, told)  # numbers may be too large for a codec
        return told


def _key(shard: ShardOf) -> tuple[int, int]:
    return shard.link.index, shard.number
