"""Subscriptions to a key or a model: notified of new versions, without polling.

The server keeps the question until there is a newer version, or until there can be none: the
follower has closed the subscription or left the job, or all workers of the key have left.

Threads: `wait` in one thread; `close` from any.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from paceline.errors import PeerTimeout
from paceline.ps.client.remote_table import RemoteTable
from paceline.runtime.work import Work

_numbers = itertools.count(1)


class Subscription:
    """Versions as an iterable; made by `Client.subscribe` and `model.subscribe`.

    A version is the number of updates that were applied. Versions that are made while no thread
    waits are not queued: the next wait returns the newest one. Where a key is cut over several
    servers, every part has the version that is returned, or a newer one.
    """

    def __init__(self, remote: RemoteTable, after: int) -> None:
        self._remote = remote
        self._number = next(_numbers)
        self._seen = after  # the version that was returned last
        self._asked: list[Work[Any]] = []
        self._is_closed = False

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Block until there is a version that is newer than the last one; return it.

        None: there will be none any more. PeerTimeout when `timeout_s` passes first; the next call
        continues to wait.
        """
        if self._is_closed or self._remote.is_over:
            return None
        if not self._asked:
            self._asked = self._remote.follow(self._seen, self._number)
            if self._is_closed:  # meanwhile, before the servers knew what there was to end
                self._remote.unfollow(self._number)
        newest = min(self._answers(timeout_s))
        self._asked = []
        if newest <= self._seen:
            self._is_closed = True
            return None
        self._seen = newest
        return newest

    def close(self) -> None:
        """End the subscription: a thread that waits gets None."""
        was_closed, self._is_closed = self._is_closed, True
        if not was_closed and not self._remote.is_over:
            self._remote.unfollow(self._number)

    def __iter__(self) -> Iterator[int]:
        while (version := self.wait()) is not None:
            yield version

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, timeout_s: float | None) -> list[int]:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        found = []
        for work in self._asked:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            try:
                found.append(work.wait(left_s).version)
            except PeerTimeout:
                raise PeerTimeout(
                    f"{self._remote.name} has no version above {self._seen} yet,"
                    f" after {timeout_s:g} s"
                ) from None
        return found
