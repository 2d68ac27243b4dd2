"""What a trace shows of the exchange of buckets: from when to when each was under way.

The engine does not say when an operation ended. So an end is the moment at which it was noticed: by
looking whenever another bucket is submitted, or because somebody waited for it. It is never before
the true end, and while a worker waits it is the true one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from paceline.observe.telemetry.trace import tracer
from paceline.pace.exchange import Bucket, Exchange
from paceline.runtime.work import Handle


class _UnderWay(NamedTuple):
    bucket: Bucket
    work: Handle
    start_s: float
    step: int


class ExchangeSpans:
    """Follows the buckets of one backward pass, while it is traced. Of the thread that trains."""

    def __init__(self, exchange: Exchange) -> None:
        self._traits = exchange.traits
        self._under_way: deque[_UnderWay] = deque()

    def submitted(self, bucket: Bucket, work: Handle, start_s: float) -> None:
        """Note that a bucket was full at `start_s`, and is under way since then."""
        num_bytes = bucket.grads.nbytes
        tracer.mark(f"bucket {bucket.index} ready", start_s, bucket=bucket.index, bytes=num_bytes)
        self._under_way.append(_UnderWay(bucket, work, start_s, tracer.step))
        if self._traits.work_is_whole:
            self._look()

    def wait(self, works: Sequence[Handle]) -> None:
        """Wait for buckets one after the other, where that makes no difference to others: the end
        of each is then known."""
        if not self._traits.may_wait_singly or not self._under_way:
            return
        for work in works:
            work.wait()
            self._look()

    def ended(self, waited_since_s: float) -> None:
        """Note that all of them have ended, for which this thread has waited."""
        now_s = time.monotonic()
        while self._under_way:
            self._record(self._under_way.popleft(), now_s)
        tracer.add("wait", waited_since_s, behind=self._traits.verb)

    def dropped(self) -> None:
        """Forget those that are submitted again."""
        self._under_way.clear()

    def _look(self) -> None:
        now_s = time.monotonic()
        while self._under_way and self._under_way[0].work.done():  # they end in order
            self._record(self._under_way.popleft(), now_s)

    def _record(self, one: _UnderWay, end_s: float) -> None:
        index, num_bytes = one.bucket.index, one.bucket.grads.nbytes
        verb = self._traits.verb
        args = {"bucket": index, "bytes": num_bytes}
        tracer.add_beside(verb, f"{verb} bucket {index}", one.start_s, end_s, one.step, **args)
