"""What happens to one flat tensor between the workers, in up to two hops.

    start     encode it, and send what others need of it        (hop 1)
    forward   when theirs have come: send what comes of it      (hop 2, if there is one)
    finish    when that has come: write the mean

`start` is called again, with the same key, when a worker was lost: then what was encoded is sent
once more, and nothing is added to the residual a second time. Small tensors travel with hop 1 as
they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from paceline.collectives.group import Group
from paceline.compress.codec import Codec, Ground
from paceline.compress.draw import Draw
from paceline.telemetry.traffic import Account
from paceline.work import Work

_LOOK_EVERY = 50  # steps between two looks at the error


class Journey:
    """One flat tensor. Main thread only."""

    def __init__(self, codec: Codec, ground: Ground) -> None:
        self.codec = codec
        self.layout = ground.layout
        self.allocate = ground.allocate
        self.rank = ground.rank
        self.residual = torch.zeros(self.layout.size) if codec.has_feedback else None
        self.account = Account()
        self._key: int | None = None
        self.steps = 0  # how often something was encoded; alike on all workers
        self._small = ground.allocate(self.layout.num_small, torch.float32)
        self._small_mean = ground.allocate(self.layout.num_small, torch.float32)
        self._small_work: Work[Any] | None = None
        self._first_hop: Work[Any] | None = None
        self.last_hop: Work[Any] | None = None  # what the mean is made of comes with it

    # -- what a kind of journey says --------------------------------------------------------------

    def encode(self, values: torch.Tensor, draw: Draw) -> None:
        """Write what is sent; `residual` is what it leaves out."""
        raise NotImplementedError

    def hop(self, group: Group) -> Work[Any]:
        """Send it."""
        raise NotImplementedError

    def second_hop(self, group: Group) -> None:
        """Make use of what has come, and send what comes of it."""

    def write(self, out: torch.Tensor) -> None:
        """Write the mean of the large spans; the last hop is done."""
        raise NotImplementedError

    def common(self) -> Iterator[torch.Tensor]:
        """Yield what is kept from step to step alike on all workers, which a newcomer must have."""
        return iter(())

    def own(self) -> Iterator[torch.Tensor]:
        """Yield what is kept from step to step on this worker alone."""
        if self.residual is not None:
            yield self.residual

    @property
    def sent_bytes(self) -> int:
        """What this worker hands to others each time, without the small tensors."""
        raise NotImplementedError

    # -- the way ----------------------------------------------------------------------------------

    def start(self, values: torch.Tensor, group: Group, key: int) -> Work[Any]:
        """Send `values`, which are encoded unless they have been under this key."""
        with self.account.working():
            if key != self._key:
                self._encode(values, key)
        if self.layout.num_small:
            work = group.all_reduce(self._small, "mean", out=self._small_mean, async_op=True)
            assert isinstance(work, Work)
            self._small_work = work
        self._first_hop = self.hop(group)
        size = group.size
        small = 4 * self.layout.num_small * 2 * (size - 1) // size
        self.account.sent(8 * self.layout.size * (size - 1) // size, self.sent_bytes + small)
        return self._first_hop

    @property
    def is_here(self) -> bool:
        """Whether the first hop is done, and well."""
        work = self._first_hop
        return work is not None and work.done() and work.error() is None

    def forward(self, group: Group) -> None:
        """Do the second hop; blocks until the first one is done."""
        assert self._first_hop is not None, "it is sent before it is forwarded"
        self._first_hop.wait()
        with self.account.working():
            self.second_hop(group)

    def finish(self, out: torch.Tensor) -> None:
        """Write the mean of what the workers sent."""
        assert self.last_hop is not None, "it is sent before it is read"
        self.last_hop.wait()
        if self._small_work is not None:
            self._small_work.wait()
        with self.account.working():
            self.write(out)
            at = 0
            for span in self.layout.small:
                span.of(out).copy_(self._small_mean[at : at + span.count])
                at += span.count

    def left_out(self) -> torch.Tensor | None:
        """Return what has not been sent yet."""
        return self.residual

    def forget(self) -> None:
        """Everything has been handed over by other means: nothing is left out."""
        if self.residual is not None:
            self.residual.zero_()

    def _encode(self, values: torch.Tensor, key: int) -> None:
        self._key = key
        is_looking = self.residual is not None and self.steps % _LOOK_EVERY == 0
        size = self._wanted_size(values) if is_looking else 0.0
        self.encode(values, Draw(self.codec.seed + 1 + self.rank, self.steps, self.layout.first))
        self.steps += 1
        at = 0
        for span in self.layout.small:
            self._small[at : at + span.count].copy_(span.of(values))
            at += span.count
        if size and self.residual is not None:
            self.account.missed(float(torch.linalg.vector_norm(self.residual)) / size)

    def _wanted_size(self, values: torch.Tensor) -> float:
        assert self.residual is not None
        wanted = (span.of(values) + span.of(self.residual) for span in self.layout.large)
        return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in wanted))
