"""The exchange of buckets in a trace: when each began and ended.

The engine does not report when an operation ended. So an end is the moment at which this worker
noticed it: when it submitted another bucket, or waited for this one. That is never before the true
end, and during a wait it is the true one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from paceline.observe.telemetry.trace import tracer
from paceline.pace.exchange import Bucket, Exchange
from paceline.runtime.work import Handle


class _OpenSpan(NamedTuple):
    bucket: Bucket
    work: Handle
    start_s: float
    step: int


class ExchangeSpans:
    """Follows the buckets of one backward pass, while it is traced. Main thread only."""

    def __init__(self, exchange: Exchange) -> None:
        self._traits = exchange.traits
        self._open: deque[_OpenSpan] = deque()

    def submitted(self, bucket: Bucket, work: Handle, start_s: float) -> None:
        """Record that a bucket was full at `start_s`, and that its exchange began."""
        num_bytes = bucket.grads.nbytes
        tracer.mark(f"bucket {bucket.index} ready", start_s, bucket=bucket.index, bytes=num_bytes)
        self._open.append(_OpenSpan(bucket, work, start_s, tracer.step))
        if self._traits.work_is_whole:
            self._look()

    def wait(self, works: Sequence[Handle]) -> None:
        """Wait for buckets one after the other, where that delays no other worker: the end of each
        is then known."""
        if not self._traits.may_wait_singly or not self._open:
            return
        for work in works:
            work.wait()
            self._look()

    def ended(self, waited_since_s: float) -> None:
        """Record that all of them have ended, for which this thread has waited."""
        now_s = time.monotonic()
        while self._open:
            self._record(self._open.popleft(), now_s)
        tracer.add("wait", waited_since_s, behind=self._traits.verb)

    def dropped(self) -> None:
        """Forget those that will be submitted again."""
        self._open.clear()

    def _look(self) -> None:
        now_s = time.monotonic()
        while self._open and self._open[0].work.done():  # they end in order
            self._record(self._open.popleft(), now_s)

    def _record(self, one: _OpenSpan, end_s: float) -> None:
        index, num_bytes = one.bucket.index, one.bucket.grads.nbytes
        verb = self._traits.verb
        args = {"bucket": index, "bytes": num_bytes}
        tracer.add_async(verb, f"{verb} bucket {index}", one.start_s, end_s, one.step, **args)
