"""The mean of the workers' models, as an outer pace needs it: as it is, or in fewer bytes.

What is compressed is what each worker has changed since the block began, which is small; the mean
of the models is where it began, and the mean of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.compress.registry import CodecSpec, parse_codec
from paceline.errors import UsageError
from paceline.pace.compressed import Journeys
from paceline.pace.exchange import Bucket
from paceline.pace.method import Setting
from paceline.runtime.work import Work
from paceline.state.protocol import Change, State


class Means:
    """Makes means of flat tensors of all workers. Main thread only."""

    def __init__(self, setting: Setting) -> None:
        self._workers = setting.workers
        self._changes: dict[int, torch.Tensor] = {}  # by the number of the bucket
        codec = parse_codec(setting.options["compress"])
        _check(setting, codec)
        self.compresses = codec.is_on
        self._journeys: Journeys | None = None
        if codec.is_on and setting.another is not None:
            self._journeys = Journeys(
                codec,
                setting.allocate,
                setting.workers,
                setting.another,
                is_elastic=setting.is_elastic,
            )
            setting.open_books(str(codec), self._journeys.accounts)

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Look after more buckets."""
        if self._journeys is None:
            return
        self._journeys.take(buckets)
        for bucket in buckets:
            if self._journeys.of(bucket) is not None:
                self._changes[bucket.index] = torch.empty_like(bucket.params)

    def start(
        self,
        bucket: Bucket,
        values: torch.Tensor,
        begin: torch.Tensor | None,
        out: torch.Tensor | None,
        *,
        key: int,
        is_last: bool,
    ) -> Work[Any]:
        """Let `out` be the mean of `values`; `begin` is what all workers began with.

        With the same key the same is sent again. For the last time everything is, as it is: nobody
        would send later what is left out.
        """
        journey = None if self._journeys is None else self._journeys.of(bucket)
        if journey is None or self._journeys is None or begin is None or is_last:
            work = self._workers.all_reduce(values, "mean", out=out, async_op=True)
            assert isinstance(work, Work)
            if journey is not None:
                journey.forget()
            return work
        change = torch.sub(values, begin, out=self._changes[bucket.index])
        sent, journeys = self._journeys.start(journey, change, key), self._journeys

        def finish() -> None:
            assert out is not None
            journeys.forward_all()
            journey.finish(out)
            out.add_(begin)

        return Work(sent.handle, finish, keep=sent)

    def move_on(self) -> None:
        """Do without waiting what can be done for those under way."""
        if self._journeys is not None:
            self._journeys.forward_some()

    def begin_again(self) -> None:
        """A worker was lost: what was under way is sent again."""
        if self._journeys is not None:
            self._journeys.begin_again()

    def state(self) -> State:
        """Return what the codec keeps, and how often each bucket has travelled."""
        return State([]) if self._journeys is None else self._journeys.state()

    def load(self, state: State, change: Change | None) -> None:
        """Take it over."""
        if self._journeys is not None:
            self._journeys.load(state, change)


def _check(setting: Setting, codec: CodecSpec) -> None:
    if codec.entry.only_gradients:
        raise UsageError(
            f"pace {setting.pace} brings models together, and compress={codec} cannot be used on"
            f" them: {codec.entry.only_gradients}"
        )
    if codec.is_on and setting.centre is not None:
        raise UsageError(
            f"pace {setting.pace} with servers: models travel to them as they are; leave out"
            " compress, or start the job without -s"
        )
