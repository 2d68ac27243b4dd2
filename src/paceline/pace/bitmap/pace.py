"""A majority vote on the signs of gradients: one bit for each is sent, in both directions.

    bitmap                 Signum: each worker votes with the signs of its momentum,
                               m <- b m + (1 - b) g
    [momentum=0]           signSGD: with those of its gradients
    [feedback=yes]         with those of v = m + e, and what the vote leaves out is carried over:
                               e <- v - s sign(v),  s = the mean of |v| over the bucket

All workers step with what most of them voted for, +1 or -1 for each parameter, which the optimizer
multiplies by its learning rate; with feedback plus or minus the mean of all s. Momentum and error
are each worker's own, and a newcomer starts with none.

A value that is zero or not finite has no sign, and with as many votes for plus as for minus there
is no majority: a coin decides (compress/sign_bits.py), in the first case one of the worker's own,
in the second one that all workers compute alike. After an even number of steps in which no worker
had a sign, a parameter has its old value.

Bernstein et al. 2018, arXiv 1802.04434 and 1810.05291; error feedback after Karimireddy et al.
2019, arXiv 1901.09847.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.comm.shared_memory import zeros_in_large_pages
from paceline.compress.kernels import Draw
from paceline.compress.sign_bits import Momentum, pack_corrected, pack_signs, pack_tracked
from paceline.errors import UsageError
from paceline.pace.allreduce import COMPOUND, AllReduce, MaskAverage
from paceline.pace.bitmap.vote import BucketVote, ServedBucketVote, VoteTable, mean_scales
from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.pace.method import Method, Setting
from paceline.runtime.work import Work
from paceline.state.protocol import Change, State


class Voter:
    """The votes of this worker on one bucket, and what it keeps for them.

    Momentum and error change in place, when a backward pass is voted on. If a worker is lost, the
    same pass is voted on again: what is kept includes its gradients already, and has the signs.
    """

    def __init__(self, bucket: Bucket, first: int, method: Bitmap) -> None:
        size, dtype = bucket.grads.numel(), bucket.grads.dtype
        wide = dtype if dtype == torch.float64 else torch.float32
        self._method = method
        self._wide = wide
        self._first = first  # index of its first element among those of the full model
        self._momentum = (
            Momentum(zeros_in_large_pages(size, wide), method.momentum) if method.momentum else None
        )
        # What was voted with; the error is its difference from the scaled signs.
        self._voted = zeros_in_large_pages(size, wide) if method.has_feedback else None
        self.scale = 0.0  # of the signs of what was voted with
        self._last_pass = -1  # the pass whose gradients were added last
        self.bucket = bucket
        allocate, on_servers = method.setting.allocate, method.setting.centre is not None
        self.vote_state: BucketVote | ServedBucketVote = (
            ServedBucketVote(bucket.label, size, allocate, first)
            if on_servers
            else BucketVote(size, allocate, has_scale=method.has_feedback)
        )

    @property
    def coin(self) -> Draw:
        """The coin for ties."""
        return Draw(self._method.seed, self._method.steps, self._first)

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield what this worker keeps between steps."""
        if self._momentum is not None:
            yield self._momentum.values
        if self._voted is not None:
            yield self._voted

    def vote(self, number: int) -> None:
        """Write this worker's signs to the vote; the same for the same backward pass."""
        is_repeated, self._last_pass = number == self._last_pass, number
        method, vote_state, coin = self._method, self.vote_state, self.coin
        mine = Draw(coin.seed + 1 + method.workers.rank, coin.step, coin.first)
        momentum, voted = self._momentum, self._voted
        if is_repeated and voted is not None:
            pack_signs(voted, mine, vote_state.signs)
            return
        if is_repeated and momentum is not None:
            pack_signs(momentum.values, mine, vote_state.signs)
            return
        values = self.bucket.grads.to(self._wide)
        if voted is not None:
            scale = pack_corrected(values, momentum, voted, self.scale, mine, vote_state.signs)
            # Rounded as the kernel will subtract it.
            self.scale = vote_state.scale = float(torch.tensor(scale, dtype=self._wide))
        elif momentum is not None:
            pack_tracked(values, momentum, mine, vote_state.signs)
        else:
            pack_signs(values, mine, vote_state.signs)


class Bitmap(Method):
    """Manages the voters of all buckets."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.momentum = setting.number("momentum")
        self.has_feedback = setting.is_on("feedback")
        self.seed = int(setting.number("seed"))
        self.voters: dict[int, Voter] = {}  # by bucket index
        self.vote_tables: dict[int, tuple[VoteTable, int]] = {}  # on servers; number of the item
        self._num_elements = 0
        self._ending: list[bool] = []  # by table, as a peer sent it
        if self.momentum >= 1:
            raise UsageError(
                f"pace {setting.pace}: momentum={self.momentum:g}, expected less than 1; 0 votes"
                " with the gradients themselves"
            )

    def describe(self) -> str:
        what = f"momentum {self.momentum:g}" if self.momentum else "gradients"
        feedback = " with error feedback" if self.has_feedback else ""
        return f"majority of {self.workers.size} on signs of {what}{feedback}"

    def exchange(self) -> Exchange:
        return SignVote(self) if self.setting.centre is None else ServedVote(self)

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        for bucket in buckets:
            self.voters[bucket.index] = Voter(bucket, self._num_elements, self)
            self._num_elements += bucket.grads.numel()
        if self.setting.centre is not None and buckets:
            states = [self.voters[bucket.index].vote_state for bucket in buckets]
            served = [state for state in states if isinstance(state, ServedBucketVote)]
            table = VoteTable(self.setting.centre, served, self.seed)
            for number, bucket in enumerate(buckets):
                self.vote_tables[bucket.index] = (table, number)

    def before_step(self) -> None:
        for table in self._all_tables():
            table.end_step()

    def _all_tables(self) -> list[VoteTable]:
        return list(dict.fromkeys(table for table, _ in self.vote_tables.values()))

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        """Return the values, the same on all workers to the bit; a mean could be rounded."""
        return bucket.params

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        kept = [tensor for voter in self.voters.values() for tensor in voter.kept()]
        return State(
            counts=[[voter.scale for voter in self.voters.values()]],
            own={str(number): tensor for number, tensor in enumerate(kept)},
            passing={
                "steps": self.steps,
                "ending": [table.is_ending for table in self._all_tables()],
            },
        )

    def load(self, state: State, change: Change | None) -> None:
        super().load(state, change)
        if change is not None:
            self._ending = state.passing["ending"]
            if state.passing["steps"] > self.steps:  # the current step counts: others took it
                self.before_step()
            return
        (scales,) = state.counts
        for voter, scale in zip(self.voters.values(), scales, strict=True):
            voter.scale = scale

    def resume(self, change: Change) -> None:
        if change.is_new(self.workers.ranks[self.workers.rank]):
            for table, is_ending in zip(self._all_tables(), self._ending, strict=False):
                if is_ending:
                    table.repeat_end()


def _traits_of(method: Bitmap) -> ExchangeTraits:
    """Return the traits of a vote: NaN and infinity have no sign, and a count of signs does not
    use the weights of batches."""
    return replace(COMPOUND, hides_nonfinite=True, is_weighted=method.has_feedback)


class SignVote(AllReduce):
    """Votes on buckets during backward.

    The results of slices are sent in a group of their own, where their order is that of the buckets
    again: when they can be sent differs from worker to worker.
    """

    def __init__(self, method: Bitmap) -> None:
        super().__init__(method.workers)
        self.traits = _traits_of(method)
        assert method.setting.another is not None, "training can create other groups"
        self._method = method
        self._tellers = method.setting.another("told")
        self._uncounted: deque[BucketVote] = deque()
        self._last = -1
        self.sent_bytes = 0  # to other workers so far

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:
        if bucket.index <= self._last:  # another pass, or the same one again
            self._uncounted.clear()
        self._last = bucket.index
        voter = self._method.voters[bucket.index]
        voter.vote(step)
        assert isinstance(voter.vote_state, BucketVote)
        work = voter.vote_state.cast(self._method.workers, voter.coin)
        self.sent_bytes += voter.vote_state.sent_bytes
        self._uncounted.append(voter.vote_state)
        while self._uncounted and self._uncounted[0].is_here:
            self._uncounted.popleft().count(self._tellers)
        return Work(work.handle, lambda: self._finish(voter), keep=work)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        self._count_all()
        return super().reduce_used_mask(here)

    def _count_all(self) -> None:
        while self._uncounted:
            self._uncounted.popleft().count(self._tellers)

    def _finish(self, voter: Voter) -> None:
        self._count_all()
        assert isinstance(voter.vote_state, BucketVote)
        voter.vote_state.read(voter.bucket.averaged)


class ServedVote(Exchange):
    """Votes on buckets during backward; servers count the votes."""

    def __init__(self, method: Bitmap) -> None:
        self.traits = _traits_of(method)
        self._mask = MaskAverage(method.workers)
        self._method = method
        self._step = -1
        self._cast: dict[int, Work[Any]] = {}  # in this step, by bucket index
        self.scales: dict[int, float] = {}  # those that all agreed on
        self.sent_bytes = 0  # to servers so far

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:
        if step != self._step:
            self._step, self._cast = step, {}
        index = bucket.index
        voter, (table, number) = self._method.voters[index], self._method.vote_tables[index]
        if index not in self._cast:  # else a worker was lost, and the servers' result is valid
            voter.vote(step)
            self._cast[index] = table.cast(number)
            self.sent_bytes += voter.vote_state.sent_bytes
        work = self._cast[index]
        return Work(work.handle, lambda: self._finish(voter), keep=work)

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        """Wait for the servers first: no worker finishes before all have their result.

        A worker that learns of a loss in that wait continues from here; others may start again, and
        arrive here too. So the exchange between the workers comes afterwards.
        """
        for work in self._cast.values():
            work.wait()
        if self._method.has_feedback:
            voters = self._method.voters
            scales = [voters[index].vote_state.scale for index in self._cast]
            means = mean_scales(self._method.workers, scales)
            self.scales = dict(zip(self._cast, means, strict=True))
        return self._mask.average(here)

    def _finish(self, voter: Voter) -> None:
        assert isinstance(voter.vote_state, ServedBucketVote)
        scale = self.scales.get(voter.bucket.index, 1.0)
        voter.vote_state.read(voter.bucket.averaged, scale)
