"""Gossip: after every step each worker averages its parameters with a few others.

    gossip:ring          with both neighbours, one third each
    gossip:exponential   with the one at distance 1, 2, 4, ..., in turns, one half each
    gossip:random        in pairs that are drawn for each step from a common seed

For every worker the weights of what it receives add up to one, and so do those of what it sends:
the mean over all workers does not change, and each worker approaches it. A worker waits only for
its neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from paceline.pace.exchange import Bucket
from paceline.pace.method import Method, Setting
from paceline.runtime.work import Work


class Gossip(Method):
    """Averages with neighbours."""

    agrees_every = 16  # agreeing after every step, all workers would wait for all

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._topology = setting.pace.word
        self._seed = int(setting.number("seed"))
        self._received: dict[int, list[torch.Tensor]] = {}  # by bucket index
        self._met_in = -1  # the generation in which all workers have formed the group

    def describe(self) -> str:
        return f"each with its neighbours ({self._topology})"

    def neighbours(self) -> tuple[list[int], list[int]]:
        """Return to and from which ranks of the group to send, in the last step."""
        me, size, step = self.workers.rank, self.workers.size, self.steps
        if size == 1:
            return [], []
        if self._topology == "ring":
            both = list(dict.fromkeys(((me - 1) % size, (me + 1) % size)))
            return both, both
        if self._topology == "exponential":
            distances = [1 << k for k in range((size - 1).bit_length())]
            distance = distances[step % len(distances)]
            return [(me + distance) % size], [(me - distance) % size]
        order = random.Random(f"{self._seed} {step}").sample(range(size), size)
        place = order.index(me)
        partner = place ^ 1
        pair = [order[partner]] if partner < size else []
        return pair, pair

    @property
    def is_due(self) -> bool:
        return self.rounds < self.steps

    def run_round(self) -> None:
        if self._met_in != self.workers.generation:  # all form a group, at its first use
            self.workers.barrier()
            self._met_in = self.workers.generation
        to, of = self.neighbours()
        works: list[Work[torch.Tensor]] = []
        for bucket in self.buckets:
            # A tag for each: before the first connection is open, a send can overtake another one.
            tag = bucket.index
            for inbox, rank in zip(self._inboxes(bucket, len(of)), of, strict=True):
                works.append(self.workers.recv(inbox, rank, tag=tag, async_op=True))  # type: ignore[arg-type]
            values = bucket.params
            works += [self.workers.send(values, rank, tag=tag, async_op=True) for rank in to]  # type: ignore[misc]
        for work in works:
            work.wait()

    def _inboxes(self, bucket: Bucket, count: int) -> Sequence[torch.Tensor]:
        boxes = self._received.setdefault(bucket.index, [])
        while len(boxes) < count:
            boxes.append(self.setting.allocate(bucket.params.numel(), bucket.params.dtype))
        return boxes[:count]

    def apply_round(self) -> None:
        _, of = self.neighbours()
        with torch.no_grad():
            for bucket in self.buckets:
                received = self._inboxes(bucket, len(of))
                for values in received:
                    bucket.params.add_(values)
                bucket.params.div_(1 + len(received))
