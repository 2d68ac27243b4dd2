"""Pools of work as a member asks for them: portions ahead of time, and word of what is done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from paceline.cluster import messages as m
from paceline.cluster.notice import WaitNotice
from paceline.cluster.store_calls import expect

PORTION_S = 60.0  # a coordinator that is restarted is back long before
_SLICE_S = 0.5


class PoolCalls(ABC):
    """Asks the coordinator for portions of work."""

    @abstractmethod
    def _ask_soon(self, make: Callable[[int], Any], timeout_s: float) -> Future[m.Answer]:
        """Send the request that `make` makes with an id; its answer comes later."""

    @abstractmethod
    def _tell(self, message: Any) -> None:
        """Say something that needs no answer."""

    def take_portion(
        self,
        line: str,
        index: int,
        portions: int,
        done: tuple[int, ...] = (),
        before: tuple[tuple[int, int], ...] = (),
    ) -> Future[m.Answer]:
        """Ask for a portion of a pool. Returns at once; `lent` waits for the answer."""
        what = (line, index, portions, done, before)
        return self._ask_soon(lambda n: m.TakePortion(n, *what), PORTION_S)

    def settle_portions(
        self, line: str, index: int, done: tuple[int, ...] = (), back: tuple[int, ...] = ()
    ) -> None:
        """Say that portions are done, or that this member will not do them. Returns at once; while
        the coordinator is away nobody hears it."""
        if done or back:
            self._tell(m.SettlePortions(line, index, done, back))

    def pool_state(self, line: str, index: int) -> m.PoolState:
        """Return how far a pool is. Blocks."""
        answer = self._ask_soon(lambda n: m.LookAtPool(n, line, index), PORTION_S)
        return expect(answer.result(), m.PoolState)


def lent(answer: Future[m.Answer]) -> m.Lent:
    """Wait for a portion; raises what the coordinator, or the way to it, has against it."""
    notice = WaitNotice("this worker waits for the coordinator to lend it a portion of the data")
    while not wait([answer], _SLICE_S).done:
        notice.check()
    return expect(answer.result(), m.Lent)
