"""The vote on the signs of buckets, counted by parameter servers.

Each bucket is an item of one table, whose elements are the words of its bits; they travel as
float64, which nobody computes with. When every worker has pushed its words the servers have the
majority (ps/server/shard.py), with the same coin for ties as the workers have among themselves
(vote.py), so the result is the same to the bit. A worker sends one bit for each element, and one
comes back.

The scales of error feedback are one number for each bucket: they go from worker to worker.

When a worker is lost, the servers count without it what is not counted yet; what is counted stands.
So nobody votes again, and all who are left read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.compress.sign_bits import num_words, unpack_signs
from paceline.pace.bitmap.vote import Allocate
from paceline.pace.centre import Centre
from paceline.ps.client.items import Item, ItemParam
from paceline.runtime.work import Work


class ServedBallot:
    """The votes on one bucket; takes the place of a Ballot."""

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
        """What this worker hands to others in one vote."""
        return self.signs.numel() * self.signs.element_size()


class BallotBox:
    """The table of some buckets; made by all workers together."""

    def __init__(self, centre: Centre, ballots: Sequence[ServedBallot], seed: int) -> None:
        self._place = centre.ballot_box([ballot.item for ballot in ballots], seed)
        self._is_open = False  # something was cast since the last step

    def cast(self, number: int) -> Work[Any]:
        """Hand over this worker's votes on a bucket; done when the majority is there.

        Blocks until all workers have ended the step before.
        """
        if self._place.is_committed:
            self._place.commit(None).wait()
            self._place.conclude()
        self._is_open = True
        return self._place.table.push(number)

    def end_step(self) -> None:
        """The step counts: the next votes are on the next one.

        Does not wait for the others: one of them may have to hear of the step from this worker
        before it can end it.
        """
        if self._is_open:
            self._is_open = False
            self._place.commit(None)

    @property
    def is_ending(self) -> bool:
        """Whether this worker has ended a step that others perhaps have not."""
        return self._place.is_committed

    def repeat_end(self) -> None:
        """End the step that a peer has ended; where all have done so, servers only answer."""
        self._place.commit(None)


def mean_scales(workers: Group, scales: Sequence[float]) -> list[float]:
    """Return the means of all workers' scales. Collective."""
    means = torch.tensor(scales, dtype=torch.float64)
    workers.all_reduce(means, "mean")
    return means.tolist()
