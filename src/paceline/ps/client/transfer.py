"""Parts of flat tensors on their way between a worker and the servers: as they are, or as packets.

On one host a tensor is named where it lies, and values are written where they belong. Between hosts
it travels, perhaps in a narrower dtype: then it is converted in memory that is kept for that. Which
of the two it is may change with the server that answers, so it is decided when a request is sent,
and when a reply is read.

A shard's packet is filled once for each step, under its key, and then sent as often as it has to
be. The reply names the codec of an average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.compress.codec import Span
from paceline.compress.packet import Packet, PacketFormat
from paceline.ps import messages as m
from paceline.ps.client.items import RemoteShard, dtype_name
from paceline.ps.packing import MeanPackets, Packing
from paceline.ps.spec import ShardSpec
from paceline.runtime.work import Work

WIRE = {"fp32": "", "bf16": "bfloat16", "fp16": "float16"}


class Staging:
    """A worker's memory for what travels in the dtype of the wire."""

    def __init__(self, wire: str) -> None:
        self.dtype = WIRE[wire]  # in messages; "" is the tensors' own
        self._memory: dict[tuple[str, int, int], torch.Tensor] = {}  # by use, partition, shard

    def cast(self, use: str, shard: RemoteShard, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the dtype of the wire; on one host nothing goes over a wire."""
        memory = self.landing(use, shard, tensor)
        return memory if memory is tensor else memory.copy_(tensor)

    def landing(self, use: str, shard: RemoteShard, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or memory of the same size in the dtype of the wire."""
        if shard.link.is_local or not self.dtype or self.dtype == dtype_name(tensor.dtype):
            return tensor
        key = (use, shard.link.index, shard.number)
        if key not in self._memory:
            self._memory[key] = torch.empty(tensor.numel(), dtype=getattr(torch, self.dtype))
        return self._memory[key]


class OutgoingTensor:
    """A shard's part of a flat tensor that goes out: named where it lies, or sent after."""

    codec = ""  # that reads it

    def __init__(
        self, shard: RemoteShard, flat: torch.Tensor, staging: Staging | None = None
    ) -> None:
        self.shard, self._flat, self._staging = shard, flat, staging

    def locate(self) -> m.Where | None:
        """Prepare it for the server that answers now; return where it lies."""
        self.tensor = self.shard.of(self._flat)
        if self._staging is not None:
            self.tensor = self._staging.cast("grad", self.shard, self.tensor)
        return self.shard.link.hand_over(self.tensor)

    def payload(self) -> Sequence[torch.Tensor]:
        """Return what has to follow the request, which is made first."""
        return () if self.shard.link.is_local else (self.tensor,)


class OutgoingPacket(OutgoingTensor):
    """A shard's part that goes out as a packet; on one host as well, so that results are alike."""

    def __init__(self, shard: RemoteShard, packet: Packet) -> None:
        super().__init__(shard, packet.payload)
        self.tensor = packet.payload  # does not change until the step has been answered
        self.codec = packet.form

    def locate(self) -> m.Where | None:
        return self.shard.link.hand_over(self.tensor)


class IncomingTensors:
    """Where tensors land that follow a reply, and where they then belong."""

    def __init__(
        self, staging: Staging, use: str, targets: Sequence[tuple[RemoteShard, torch.Tensor]]
    ) -> None:
        self._staging, self._use, self._targets = staging, use, targets
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, _: m.Reply) -> Sequence[torch.Tensor]:
        landed = [(self._staging.landing(self._use, s, to), to) for s, to in self._targets]
        self._pairs = [(memory, to) for memory, to in landed if memory is not to]
        return [memory for memory, _ in landed]

    def settle(self) -> None:
        """Bring everything where it belongs; all of it is there."""
        for memory, to in self._pairs:
            to.copy_(memory)


class IncomingAverage(IncomingTensors):
    """Where the average of one shard lands, which may come as a packet."""

    def __init__(
        self, staging: Staging, shard: RemoteShard, target: torch.Tensor, packets: MeanPackets
    ) -> None:
        super().__init__(staging, "average", [(shard, target)])
        self._target, self._packets = target, packets
        self._packet: tuple[PacketFormat, torch.Tensor] | None = None

    def __call__(self, reply: m.Reply) -> Sequence[torch.Tensor]:
        self._packet = None
        if not reply.codec:
            return super().__call__(reply)
        contents = self._packets.contents(reply.codec)
        packet = torch.empty(contents.num_bytes, dtype=torch.uint8)
        self._pairs, self._packet = [], (contents, packet)
        return [packet]

    def settle(self) -> None:
        super().settle()
        if self._packet is not None:
            contents, packet = self._packet
            contents.read(packet, self._target)


class LandedWork:
    """A Work after which tensors are brought from where they landed to where they belong."""

    def __init__(self, work: Work[m.Reply], incoming: IncomingTensors) -> None:
        self._work, self._incoming, self._is_settled = work, incoming, False
        self.done, self.error = work.done, work.error

    def wait(self, timeout_s: float | None = None) -> m.Reply:
        reply = self._work.wait(timeout_s)
        if not self._is_settled:
            self._is_settled = True
            self._incoming.settle()
        return reply


class Packets:
    """The packets of one table. Main thread only."""

    def __init__(self, staging: Staging, packing: Packing | None, mean_codec: str) -> None:
        self._staging, self._packing, self._mean_codec = staging, packing, mean_codec
        self._by_shard: dict[tuple[int, int], tuple[ShardSpec, Packet]] = {}
        self._means: dict[tuple[int, int], MeanPackets] = {}

    def add(self, shard: RemoteShard, spec: ShardSpec, first: int) -> None:
        """Add a shard, whose first element has that index in the table."""
        if self._mean_codec:
            self._means[_key(shard)] = MeanPackets(spec, self._mean_codec)
        packet = self._packing.packet(spec, first) if self._packing is not None else None
        if packet is not None:
            self._by_shard[_key(shard)] = (spec, packet)

    def of(self, shard: RemoteShard) -> Packet | None:
        """Return the packet of a shard; None: it is not packed."""
        return self._by_shard[_key(shard)][1] if _key(shard) in self._by_shard else None

    def outgoing(
        self, shard: RemoteShard, grads: torch.Tensor, absent: Sequence[int], key: int | None
    ) -> OutgoingTensor:
        """Prepare a shard's part of gradients for a push; key None: not packed."""
        if key is None or _key(shard) not in self._by_shard:
            return OutgoingTensor(shard, grads, self._staging)
        spec, packet = self._by_shard[_key(shard)]
        lacking = [Span(p.start, p.count) for p in spec.pieces if p.param in absent]
        packet.fill(shard.of(grads), key, lacking)
        return OutgoingPacket(shard, packet)

    def incoming_mean(self, shard: RemoteShard, average: torch.Tensor | None) -> IncomingTensors:
        """Return where a shard's part of averages lands; None: it is not wanted."""
        if average is None:
            return IncomingTensors(self._staging, "average", ())
        if not self._mean_codec:
            return IncomingTensors(self._staging, "average", [(shard, shard.of(average))])
        return IncomingAverage(self._staging, shard, shard.of(average), self._means[_key(shard)])

    def own(self) -> Iterator[torch.Tensor]:
        """Yield what this worker keeps of each packet from step to step, for a checkpoint."""
        for _, packet in self._by_shard.values():
            yield from packet.kept

    def counts(self) -> list[int]:
        """Return how often each has been filled."""
        return [packet.num_filled for _, packet in self._by_shard.values()]

    def recount(self, counts: Sequence[int]) -> None:
        """Continue from these counts."""
        for (_, packet), count in zip(self._by_shard.values(), counts, strict=True):
            packet.num_filled = count

    def pushed(self, shard: RemoteShard, grads: torch.Tensor, key: int) -> torch.Tensor:
        """Return what a server was pushed of a shard in a step, as it sees it."""
        packet, grad = self.of(shard), shard.of(grads)
        if packet is None:
            return grad
        pushed = torch.zeros_like(grad)
        if packet.key == key:  # else nothing was pushed
            packet.contents.read(packet.payload, pushed)  # numbers may be too large for a codec
        return pushed


def _key(shard: RemoteShard) -> tuple[int, int]:
    return shard.link.index, shard.number
