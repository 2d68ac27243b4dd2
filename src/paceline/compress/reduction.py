"""The compressed all-reduce (mean) of one flat tensor among the workers, in up to two hops.

    start     encode the tensor, and send the payload to the other workers        (hop 1)
    forward   after hop 1: process what arrived, and send the result              (hop 2, if any)
    finish    after the last hop: write the mean

If a worker was lost, `start` is called again with the same key: it sends the same payload once more
and adds nothing to the residual a second time. Small tensors are sent uncompressed with hop 1.

AllGatherReduction has one hop: each worker sends its whole payload to all other workers, and each
computes the mean. It is for payloads that cannot be summed on the way, such as selected values with
their indices. With n workers each sends its payload n - 1 times, so it suits few bytes or few
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress.codec import Codec, CodecContext
from paceline.compress.kernels import Draw
from paceline.observe.telemetry.traffic import CodecStats
from paceline.runtime.work import Work

MEASURE_EVERY = 50  # steps between two measurements of the compression error


class CompressedReduction:
    """The mean of one flat tensor over all workers, exchanged compressed. Main thread only."""

    def __init__(self, codec: Codec, context: CodecContext) -> None:
        self.codec = codec
        self.layout = context.layout
        self.allocate = context.allocate
        self.rank = context.rank
        self.residual = torch.zeros(self.layout.size) if codec.has_feedback else None
        self.account = CodecStats()
        self._key: int | None = None
        self.steps = 0  # how many steps were encoded; the same on all workers
        self._small = context.allocate(self.layout.num_small, torch.float32)
        self._small_mean = context.allocate(self.layout.num_small, torch.float32)
        self._small_work: Work[Any] | None = None
        self._first_hop: Work[Any] | None = None
        self.last_hop: Work[Any] | None = None  # `finish` waits for it
        self.is_decoded_elsewhere = False  # on a device: `write` is not called

    # -- defined by each kind of reduction --------------------------------------------------------

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        """Write values + `residual` to the payload, and the encoding error to `residual`."""
        raise NotImplementedError

    def hop(self, group: Group) -> Work[Any]:
        """Send the payload."""
        raise NotImplementedError

    def second_hop(self, group: Group) -> None:
        """Process what arrived with the first hop, and send the result."""

    def write(self, out: torch.Tensor) -> None:
        """Write the mean of the large spans; called after the last hop."""
        raise NotImplementedError

    def common(self) -> Iterator[torch.Tensor]:
        """Yield the state that is the same on all workers; a newcomer must get it."""
        return iter(())

    def own(self) -> Iterator[torch.Tensor]:
        """Yield the state that only this worker has."""
        if self.residual is not None:
            yield self.residual

    @property
    def sent_bytes(self) -> int:
        """The bytes that this worker sends in each exchange, without the small tensors."""
        raise NotImplementedError

    # -- the exchange -----------------------------------------------------------------------------

    def start(self, values: torch.Tensor, group: Group, key: int) -> Work[Any]:
        """Send `values`; encode them unless they were encoded under this key already."""
        with self.account.timed():
            if key != self._key:
                self._encode(values, key)
        if self.layout.num_small:
            work = group.all_reduce(self._small, "mean", out=self._small_mean, async_op=True)
            assert isinstance(work, Work)
            self._small_work = work
        self._first_hop = self.hop(group)
        self._count_sent(group.size)
        return self._first_hop

    def _count_sent(self, size: int) -> None:
        """Count the bytes of an exchange among this many workers."""
        small = 4 * self.layout.num_small * 2 * (size - 1) // size
        self.account.add_sent(8 * self.layout.size * (size - 1) // size, self.sent_bytes + small)

    # -- values that were encoded on a device (pace/through_host/encoded.py) ----------------------

    @property
    def small(self) -> torch.Tensor:
        """The uncompressed values that this worker sends."""
        return self._small

    @property
    def small_mean(self) -> torch.Tensor:
        """The means of the uncompressed values, after `settle`."""
        return self._small_mean

    def is_encoded(self, key: int) -> bool:
        """Return whether the payload has the values of this key."""
        return key == self._key

    def take_encoded(self, key: int) -> None:
        """Note that the payload has been filled elsewhere, with the values of this key."""
        self._key = key
        self.steps += 1

    def settle(self) -> None:
        """Wait for the last hop; the mean stays encoded."""
        assert self.last_hop is not None, "start() comes before settle()"
        self.last_hop.wait()
        if self._small_work is not None:
            self._small_work.wait()

    @property
    def is_here(self) -> bool:
        """Whether the first hop is done without an error."""
        work = self._first_hop
        return work is not None and work.done() and work.error() is None

    def forward(self, group: Group) -> None:
        """Run the second hop; blocks until the first one is done."""
        assert self._first_hop is not None, "start() comes before forward()"
        self._first_hop.wait()
        with self.account.timed():
            self.second_hop(group)

    def finish(self, out: torch.Tensor) -> None:
        """Write the mean of the workers' values to `out`."""
        self.settle()
        with self.account.timed():
            self.write(out)
            self.layout.unpack_small(self._small_mean, out)

    def left_out(self) -> torch.Tensor | None:
        """Return the values that have not been sent yet."""
        return self.residual

    def forget(self) -> None:
        """Clear the residual: its values were transferred in another way."""
        if self.residual is not None:
            self.residual.zero_()

    def _encode(self, values: torch.Tensor, key: int) -> None:
        self._key = key
        size = 0.0
        if self.residual is not None and self.steps % MEASURE_EVERY == 0:
            size = self.layout.wanted_size(values, self.residual)
        self.encode(values, Draw(self.codec.seed + 1 + self.rank, self.steps, self.layout.first))
        self.steps += 1
        self.layout.pack_small(values, self._small)
        if size and self.residual is not None:
            self.account.add_error(float(torch.linalg.vector_norm(self.residual)) / size)


class AllGatherReduction(CompressedReduction):
    """A reduction that all-gathers the payloads of all spans, which are consecutive in memory."""

    def __init__(self, codec: Codec, context: CodecContext) -> None:
        super().__init__(codec, context)
        self._ends = [0]
        self._payload = self._rows_memory = torch.empty(0, dtype=torch.uint8)
        self._rows: Sequence[torch.Tensor] = ()
        self.resize()

    def resize(self) -> None:
        """Allocate payloads of the codec's current size; only between two exchanges."""
        sizes = [self.codec.num_bytes(span.count) for span in self.layout.large]
        self._ends = [0]
        for size in sizes:
            self._ends.append(self._ends[-1] + -(-size // 4) * 4)  # align float32 numbers
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
            self.codec.mean(self.payloads_of(number), span.of(out))

    @property
    def sent_bytes(self) -> int:
        return self._payload.numel() * (len(self._rows) - 1)

    def _part(self, row: torch.Tensor, number: int) -> torch.Tensor:
        begin = self._ends[number]
        return row[begin : begin + self.codec.num_bytes(self.layout.large[number].count)]

    def payload_of(self, number: int) -> torch.Tensor:
        """Return this worker's payload of a large span."""
        return self._part(self._payload, number)

    def payloads_of(self, number: int) -> list[torch.Tensor]:
        """Return all workers' payloads of a large span, after the exchange."""
        return [self._part(row, number) for row in self._rows]
