"""optimizer.step() with push=delta or push=params: the script's own optimizer runs on the worker.

The servers get the difference that it made, or what came out of it. What the script itself does to
parameters between two steps goes the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from paceline.data_parallel.bucket import Bucket
from paceline.data_parallel.update.served import ServedUpdate
from paceline.data_parallel.update.step import Step
from paceline.ps import messages as m


class LocalOptimizer(ServedUpdate):
    """Runs the script's optimizer here; the servers get what it did."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self._rule.push == "params" and self._number == 0:
            warnings.warn(
                "push=params: the last worker to write wins, and what others did since it read is"
                " lost (the report counts it as overwritten); push=delta or push=grad keep it",
                stacklevel=2,
            )

    def add(self, buckets: Sequence[Bucket]) -> None:
        super().add(buckets)
        self._remember(buckets)

    def begin_with_values(self, buckets: Sequence[Bucket]) -> None:
        super().begin_with_values(buckets)
        self._remember(buckets)

    def _finish(self, wait: Any) -> list[m.Reply]:
        replies = super()._finish(wait)
        if self._rule.push == "delta":
            self._remember(self._buckets)
        return replies

    def _remember(self, buckets: Sequence[Bucket]) -> None:
        """Keep what the next difference is to."""
        for bucket in buckets:
            self._exchange.outbox(bucket).copy_(bucket.params)

    def run(self, step: Step) -> Any:
        result = step()
        for bucket in self._buckets:
            outbox = self._exchange.outbox(bucket)
            if self._rule.push == "delta":
                torch.sub(bucket.params, outbox, out=outbox)
            else:
                outbox.copy_(bucket.params)
            self._wait([self._exchange.push(bucket, [])])
        self.committed_at = self.position()
        self._note_staleness(self._finish(self._exchange.commit(None).wait))
        return result
