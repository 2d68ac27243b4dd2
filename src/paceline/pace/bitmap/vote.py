"""The vote on the signs of buckets, counted by the workers or by parameter servers.

AMONG WORKERS. The words of a bucket's bits (compress/sign_bits.py) are cut into SLICES, one for
each worker, which counts the votes on it:

    cast    every worker sends each slice of its own bits to the worker that counts it  (all-to-all)
    count   each worker has a row of its slice from every worker, and makes one row of them
    send    the rows are sent to all                                                    (all-gather)
    read    all of them together are the signs that the workers agree on

A worker sends 2 (N - 1) / N of its bits to others, as a ring does with the numbers it adds up: for
float32 1/32 of that. One number of the worker that counted may be sent with the result of a slice.

ON SERVERS. Each bucket is an item of one table, whose elements are the words of its bits; they are
sent as float64, but never used as numbers. When every worker has pushed its words the servers have
the majority (ps/server/shard.py), with the same coin for ties as among workers, so the result is
the same to the bit. A worker sends one bit for each element, and receives one. The scales of error
feedback are one number for each bucket, which the workers exchange among themselves.

If a worker is lost, the servers count without it what is not counted yet; earlier results stay
valid. So no worker votes again, and all that are left read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress.kernels import Draw
from paceline.compress.sign_bits import SIGNS_IN_WORD, majority, num_words, unpack_signs
from paceline.pace.center import Centre
from paceline.ps.client.items import Item, ItemParam
from paceline.runtime.work import Work

_WORD_BYTES = 8

Allocate = Callable[[int, torch.dtype], torch.Tensor]


def cut(words: int, parts: int) -> list[int]:
    """Return where so many slices begin, and where the last one ends."""
    each, more = divmod(words, parts)
    return [each * part + min(part, more) for part in range(parts + 1)]


class BucketVote:
    """The votes on one bucket: their memory and progress. Main thread only."""

    def __init__(self, size: int, allocate: Allocate, *, has_scale: bool) -> None:
        self.signs = allocate(num_words(size), torch.int64)  # this worker's
        self.scale = 1.0  # this worker's; sent with the result if `has_scale`
        self._allocate = allocate
        self._extra = int(has_scale)
        self._layout = (0, 0)  # rank and size of the group for which the following was cut
        self._start = 0
        self._sent: Sequence[torch.Tensor] = ()
        self._received: Sequence[torch.Tensor] = ()
        self._counted = self._result = self.signs
        self._parts: Sequence[torch.Tensor] = ()
        self._coin = Draw(0, 0)
        self._cast: Work[Any] | None = None
        self._sending: Work[Any] | None = None

    def cast(self, group: Group, coin: Draw) -> Work[Any]:
        """Send `signs`; the coin decides ties."""
        self._cut_slices(group)
        self._coin, self._sending = coin.at(self._start * SIGNS_IN_WORD), None
        work = group.all_to_all(self._sent, out=self._received, async_op=True)
        assert isinstance(work, Work)
        self._cast = work
        return work

    @property
    def is_here(self) -> bool:
        """Whether all votes on this worker's slice have arrived, without an error."""
        work = self._cast
        return work is not None and work.done() and work.error() is None

    def count(self, group: Group) -> None:
        """Count them, and send the result to all; blocks until they have arrived."""
        assert self._cast is not None, "votes are cast before they are counted"
        self._cast.wait()
        num_counted = self._counted.numel() - self._extra
        majority(self._received, self._coin, self._counted[:num_counted])
        if self._extra:
            self._counted[num_counted:].view(torch.float64).fill_(self.scale)
        work = group.all_gather(self._counted, out=self._parts, async_op=True)
        assert isinstance(work, Work)
        self._sending = work

    def read(self, out: torch.Tensor) -> None:
        """Write what the workers agreed on: plus or minus 1, or the mean of their scales."""
        assert self._sending is not None, "votes are counted before they are read"
        self._sending.wait()
        if not self._extra:
            unpack_signs(self._result, 1.0, out)
            return
        scale = sum(float(part[-1:].view(torch.float64)) for part in self._parts) / len(self._parts)
        start = 0
        for part in self._parts:
            end = min(start + (part.numel() - 1) * SIGNS_IN_WORD, out.numel())
            unpack_signs(part[:-1], scale, out[start:end])
            start = end

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker sends to others in one vote."""
        rank, size = self._layout
        votes = sum(part.numel() for to, part in enumerate(self._sent) if to != rank)
        return _WORD_BYTES * (votes + self._counted.numel() * (size - 1))

    def _cut_slices(self, group: Group) -> None:
        """Cut the slices again if the group has changed."""
        if self._layout == (group.rank, group.size):
            return
        self._layout = (group.rank, group.size)
        words, extra = self.signs.numel(), self._extra
        bounds = cut(words, group.size)
        pairs = list(zip(bounds, bounds[1:], strict=False))
        self._start, end = pairs[group.rank]
        mine = end - self._start
        self._sent = [self.signs[a:b] for a, b in pairs]
        received = self._allocate(mine * group.size, torch.int64)
        self._received = [received[at * mine : (at + 1) * mine] for at in range(group.size)]
        self._counted = self._allocate(mine + extra, torch.int64)
        self._result = self._allocate(words + extra * group.size, torch.int64)
        self._parts = [
            self._result[a + at * extra : b + (at + 1) * extra] for at, (a, b) in enumerate(pairs)
        ]


class ServedBucketVote:
    """The votes on one bucket, counted by servers; has the interface of a BucketVote."""

    def __init__(self, label: str, size: int, allocate: Allocate, first: int) -> None:
        words = num_words(size)
        outbox, values, average = (allocate(words, torch.float64).zero_() for _ in range(3))
        held = ItemParam(label, 0, 0, words, (words,))
        self.item = Item(label, [held], outbox, values, average, first_sign=first)
        self.signs = outbox.view(torch.int64)  # this worker's
        self.scale = 1.0  # this worker's

    def read(self, out: torch.Tensor, scale: float) -> None:
        """Write what the workers agreed on: plus or minus `scale`."""
        average = self.item.average
        assert average is not None
        unpack_signs(average.view(torch.int64), scale, out)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker sends to servers in one vote."""
        return self.signs.numel() * self.signs.element_size()


class VoteTable:
    """The table of some buckets; created by all workers together."""

    def __init__(self, centre: Centre, ballots: Sequence[ServedBucketVote], seed: int) -> None:
        self._remote = centre.add_vote_table([ballot.item for ballot in ballots], seed)
        self._is_open = False  # something was cast since the last step

    def cast(self, number: int) -> Work[Any]:
        """Push this worker's votes on a bucket; done when the majority has arrived.

        Blocks until all workers have ended the previous step.
        """
        if self._remote.is_committed:
            self._remote.commit(None).wait()
            self._remote.begin_next_step()
        self._is_open = True
        return self._remote.table.push(number)

    def end_step(self) -> None:
        """End the step: the next votes are on the next one.

        Does not wait for the others: one of them may have to learn of the step from this worker
        before it can end it.
        """
        if self._is_open:
            self._is_open = False
            self._remote.commit(None)

    @property
    def is_ending(self) -> bool:
        """Whether this worker has ended a step that others perhaps have not."""
        return self._remote.is_committed

    def repeat_end(self) -> None:
        """End the step that a peer has ended; where all have done so, servers only reply."""
        self._remote.commit(None)


def mean_scales(workers: Group, scales: Sequence[float]) -> list[float]:
    """Return the means of all workers' scales. Collective."""
    means = torch.tensor(scales, dtype=torch.float64)
    workers.all_reduce(means, "mean")
    return means.tolist()
