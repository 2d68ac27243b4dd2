"""A majority vote on the signs of gradients: one bit for each of them travels, in both directions.

    bitmap                 Signum: each worker votes with the signs of its momentum,
                               m <- b m + (1 - b) g
    [momentum=0]           signSGD: with those of its gradients
    [feedback=yes]         with those of v = m + e, and what its vote has left out is carried over:
                               e <- v - s sign(v),  s = the mean of |v| over the bucket

All workers step with what most of them voted for, +1 or -1 for each parameter, which the optimizer
multiplies with its learning rate; with feedback plus or minus the mean of all s. Momentum and
error are each worker's own, and a newcomer begins with none.

A value that is zero or not finite has no sign, and with as many votes for plus as for minus there
is no majority: a coin decides (compress/sign_bits.py), in the first case one of the worker's own,
in the second one that all workers compute alike. After an even number of steps in which no worker
had a sign, a parameter has its old value.

Bernstein et al. 2018, arXiv 1802.04434 and 1810.05291; error feedback as Karimireddy et al. 2019,
arXiv 1901.09847, has it.
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
    """One bucket: how this worker votes on it, and what it keeps for that.

    Momentum and error change in place, as soon as a backward pass is voted on. If a worker is lost,
    the same pass is voted on again: what is kept has its gradients already, and has the signs.
    """

    def __init__(self, bucket: Bucket, first: int, method: Bitmap) -> None:
        size, dtype = bucket.grads.numel(), bucket.grads.dtype
        wide = dtype if dtype == torch.float64 else torch.float32
        self._method = method
        self._wide = wide
        self._first = first  # index of its first element among those of the whole model
        self._momentum = (
            Momentum(zeros_in_large_pages(size, wide), method.momentum) if method.momentum else None
        )
        # What was voted with; the error is what it has more than its scaled signs.
        self._voted = zeros_in_large_pages(size, wide) if method.has_feedback else None
        self.scale = 0.0  # of the signs of what was voted with
        self._last_pass = -1  # the one whose gradients were the last to come in
        self.bucket = bucket
        allocate, on_servers = method.setting.allocate, method.setting.centre is not None
        self.ballot: BucketVote | ServedBucketVote = (
            ServedBucketVote(bucket.label, size, allocate, first)
            if on_servers
            else BucketVote(size, allocate, has_scale=method.has_feedback)
        )

    @property
    def coin(self) -> Draw:
        """What decides on ties."""
        return Draw(self._method.seed, self._method.steps, self._first)

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield what this worker keeps from step to step."""
        if self._momentum is not None:
            yield self._momentum.values
        if self._voted is not None:
            yield self._voted

    def vote(self, number: int) -> None:
        """Write this worker's signs to the ballot; the same ones for the same backward pass."""
        is_repeated, self._last_pass = number == self._last_pass, number
        method, ballot, coin = self._method, self.ballot, self.coin
        mine = Draw(coin.seed + 1 + method.workers.rank, coin.step, coin.first)
        momentum, voted = self._momentum, self._voted
        if is_repeated and voted is not None:
            pack_signs(voted, mine, ballot.signs)
            return
        if is_repeated and momentum is not None:
            pack_signs(momentum.values, mine, ballot.signs)
            return
        values = self.bucket.grads.to(self._wide)
        if voted is not None:
            scale = pack_corrected(values, momentum, voted, self.scale, mine, ballot.signs)
            # As the kernel will see it when it takes it off.
            self.scale = ballot.scale = float(torch.tensor(scale, dtype=self._wide))
        elif momentum is not None:
            pack_tracked(values, momentum, mine, ballot.signs)
        else:
            pack_signs(values, mine, ballot.signs)


class Bitmap(Method):
    """Knows the voters, and when their steps count."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.momentum = setting.number("momentum")
        self.has_feedback = setting.is_on("feedback")
        self.seed = int(setting.number("seed"))
        self.voters: dict[int, Voter] = {}  # by the number of the bucket
        self.boxes: dict[int, tuple[VoteTable, int]] = {}  # the same: on servers, and its place
        self._num_elements = 0
        self._ending: list[bool] = []  # by box, as a peer has told
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
        return Vote(self) if self.setting.centre is None else ServedVote(self)

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        for bucket in buckets:
            self.voters[bucket.index] = Voter(bucket, self._num_elements, self)
            self._num_elements += bucket.grads.numel()
        if self.setting.centre is not None and buckets:
            served = [self.voters[bucket.index].ballot for bucket in buckets]
            ballots = [ballot for ballot in served if isinstance(ballot, ServedBucketVote)]
            box = VoteTable(self.setting.centre, ballots, self.seed)
            for number, bucket in enumerate(buckets):
                self.boxes[bucket.index] = (box, number)

    def before_step(self) -> None:
        for box in self._all_boxes():
            box.end_step()

    def _all_boxes(self) -> list[VoteTable]:
        return list(dict.fromkeys(box for box, _ in self.boxes.values()))

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        """All have the same values, to the bit; a mean of them could be rounded."""
        return bucket.params

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        kept = [tensor for voter in self.voters.values() for tensor in voter.kept()]
        return State(
            counts=[[voter.scale for voter in self.voters.values()]],
            own={str(number): tensor for number, tensor in enumerate(kept)},
            passing={
                "steps": self.steps,
                "ending": [box.is_ending for box in self._all_boxes()],
            },
        )

    def load(self, state: State, change: Change | None) -> None:
        super().load(state, change)
        if change is not None:
            self._ending = state.passing["ending"]
            if state.passing["steps"] > self.steps:  # the step under way counts: others took it
                self.before_step()
            return
        (scales,) = state.counts
        for voter, scale in zip(self.voters.values(), scales, strict=True):
            voter.scale = scale

    def resume(self, change: Change) -> None:
        if change.is_new(self.workers.ranks[self.workers.rank]):
            for box, is_ending in zip(self._all_boxes(), self._ending, strict=False):
                if is_ending:
                    box.repeat_end()


def _traits_of(method: Bitmap) -> ExchangeTraits:
    """Return what holds for a vote: NaN and infinity have no sign, and what one worker's batch
    weighs has no part in a count of signs."""
    return replace(COMPOUND, hides_nonfinite=True, is_weighted=method.has_feedback)


class Vote(AllReduce):
    """Has buckets voted on during backward.

    The results of slices travel in a group of their own, where their order is that of the buckets
    again: when they can be told differs from worker to worker.
    """

    def __init__(self, method: Bitmap) -> None:
        super().__init__(method.workers)
        self.traits = _traits_of(method)
        assert method.setting.another is not None, "training gives a way to other groups"
        self._method = method
        self._tellers = method.setting.another("told")
        self._uncounted: deque[BucketVote] = deque()
        self._last = -1
        self.sent_bytes = 0  # handed to others so far

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:
        if bucket.index <= self._last:  # another pass, or the same one again
            self._uncounted.clear()
        self._last = bucket.index
        voter = self._method.voters[bucket.index]
        voter.vote(step)
        assert isinstance(voter.ballot, BucketVote)
        work = voter.ballot.cast(self._method.workers, voter.coin)
        self.sent_bytes += voter.ballot.sent_bytes
        self._uncounted.append(voter.ballot)
        while self._uncounted and self._uncounted[0].is_here:
            self._uncounted.popleft().count(self._tellers)
        return Work(work.handle, lambda: self._finish(voter), keep=work)

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        self._count_all()
        return super().call_roll(here)

    def _count_all(self) -> None:
        while self._uncounted:
            self._uncounted.popleft().count(self._tellers)

    def _finish(self, voter: Voter) -> None:
        self._count_all()
        assert isinstance(voter.ballot, BucketVote)
        voter.ballot.read(voter.bucket.averaged)


class ServedVote(Exchange):
    """Has buckets voted on during backward, and the votes counted by servers."""

    def __init__(self, method: Bitmap) -> None:
        self.traits = _traits_of(method)
        self._mask = MaskAverage(method.workers)
        self._method = method
        self._step = -1
        self._cast: dict[int, Work[Any]] = {}  # in this step, by the number of the bucket
        self.scales: dict[int, float] = {}  # those that all agreed on
        self.sent_bytes = 0  # handed to others so far

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:
        if step != self._step:
            self._step, self._cast = step, {}
        index = bucket.index
        voter, (box, number) = self._method.voters[index], self._method.boxes[index]
        if index not in self._cast:  # else a worker was lost, and what servers have stands
            voter.vote(step)
            self._cast[index] = box.cast(number)
            self.sent_bytes += voter.ballot.sent_bytes
        work = self._cast[index]
        return Work(work.handle, lambda: self._finish(voter), keep=work)

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        """Wait for the servers first: nobody is through before all have what these counted.

        Whoever hears of a loss in that wait goes on from here; others may begin again, and come
        here too. So what the workers exchange among themselves comes afterwards.
        """
        for work in self._cast.values():
            work.wait()
        if self._method.has_feedback:
            voters = self._method.voters
            scales = [voters[index].ballot.scale for index in self._cast]
            means = mean_scales(self._method.workers, scales)
            self.scales = dict(zip(self._cast, means, strict=True))
        return self._mask.average(here)

    def _finish(self, voter: Voter) -> None:
        assert isinstance(voter.ballot, ServedBucketVote)
        scale = self.scales.get(voter.bucket.index, 1.0)
        voter.ballot.read(voter.bucket.averaged, scale)
