"""A member's requests to the coordinator: store operations, portions of work pools, the clock.

Each call is a request and its answer. Portions are requested ahead of time.

Every process of a job follows the coordinator's clock. A process with the same clock as the
coordinator (`config.clock_id`) adds no offset. Any other process asks several times, takes the
quickest answer, and repeats that every half minute, because clocks of different machines drift
apart. That runs in the agent's control thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from paceline import errors
from paceline.control import messages as m
from paceline.control.wait_notice import WaitNotice
from paceline.observe.telemetry.clock import Offset, Ping, estimate, set_offset
from paceline.runtime.config import clock_id

ANSWER_S = 10.0  # a coordinator that is alive answers within this
PORTION_S = 60.0  # a restarted coordinator answers long before this
_SLICE_S = 0.5
_PINGS = 8
_MEASURE_AGAIN_S = 30.0  # at 50 parts in a million, clocks are 1.5 ms apart by then

T = TypeVar("T")
Ask = Callable[[Callable[[int], Any]], Awaitable[m.Answer]]

log = logging.getLogger("paceline.control")


def expect(value: object, kind: type[T]) -> T:
    """Return the coordinator's answer; ProtocolError unless it is of this kind."""
    if not isinstance(value, kind):
        raise errors.ProtocolError(
            f"the coordinator answered with {type(value).__name__}, expected {kind.__name__};"
            " install the same Paceline version everywhere"
        )
    return value


class StoreCalls(ABC):
    """Operations of the coordinator's store. All methods block, and have their own deadline."""

    @abstractmethod
    def _ask(self, make: Callable[[int], Any], timeout_s: float = ANSWER_S) -> m.Answer:
        """Send the request that `make` makes with an id; return its answer or raise."""

    def store_set(self, key: str, value: bytes) -> None:
        self._ask(lambda n: m.StoreSet(n, key, value))

    def store_get(self, key: str, timeout_s: float = 300.0) -> bytes:
        """Wait until the key is set and return its value; PeerTimeout names the key."""
        value = self._value(lambda n: m.StoreGet(n, key, timeout_s), timeout_s + ANSWER_S)
        return expect(value, bytes)

    def store_add(self, key: str, amount: int) -> int:
        """Add to the number under key (absent counts as 0) and return the sum."""
        return expect(self._value(lambda n: m.StoreAdd(n, key, amount)), int)

    def store_compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set key if its value is `expected` (b"" for absent); return the value that now counts."""
        return expect(self._value(lambda n: m.StoreCompareSet(n, key, expected, desired)), bytes)

    def store_wait(self, keys: Iterable[str], timeout_s: float = 300.0) -> None:
        """Wait until all keys are set; PeerTimeout names those that are not."""
        names = tuple(keys)
        self._ask(lambda n: m.StoreWait(n, names, timeout_s), timeout_s + ANSWER_S)

    def store_check(self, keys: Iterable[str]) -> bool:
        names = tuple(keys)
        return expect(self._value(lambda n: m.StoreCheck(n, names)), bool)

    def store_delete(self, key: str) -> bool:
        return expect(self._value(lambda n: m.StoreDelete(n, key)), bool)

    def store_num_keys(self) -> int:
        return expect(self._value(m.StoreNumKeys), int)

    def _value(
        self, make: Callable[[int], Any], timeout_s: float = ANSWER_S
    ) -> bytes | int | bool | None:
        return expect(self._ask(make, timeout_s), m.Reply).value


class PoolCalls(ABC):
    """Requests for portions of work pools."""

    @abstractmethod
    def _ask_soon(self, make: Callable[[int], Any], timeout_s: float) -> Future[m.Answer]:
        """Send the request that `make` makes with an id; return a future of its answer."""

    @abstractmethod
    def _send(self, message: Any) -> None:
        """Send a message that has no answer."""

    def take_portion(
        self,
        line: str,
        index: int,
        portions: int,
        done: tuple[int, ...] = (),
        before: tuple[tuple[int, int], ...] = (),
    ) -> Future[m.Answer]:
        """Ask for a portion of a pool. Returns at once; `wait_for_portion` waits for the answer."""
        what = (line, index, portions, done, before)
        return self._ask_soon(lambda n: m.TakePortion(n, *what), PORTION_S)

    def settle_portions(
        self,
        line: str,
        index: int,
        done: tuple[int, ...] = (),
        back: tuple[int, ...] = (),
        begun: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Report portions as done, or return them; `begun` with the number of parts that are done.
        Returns at once; dropped while the coordinator is away."""
        if done or back or begun:
            self._send(m.SettlePortions(line, index, done, back, begun))

    def pool_state(self, line: str, index: int) -> m.PoolState:
        """Return the progress of a pool. Blocks."""
        answer = self._ask_soon(lambda n: m.LookAtPool(n, line, index), PORTION_S)
        return expect(answer.result(), m.PoolState)


def wait_for_portion(answer: Future[m.Answer]) -> m.Lent:
    """Wait for a portion; raises the coordinator's error, or that of the connection to it."""
    notice = WaitNotice("this worker waits for the coordinator to lease it a portion of the data")
    while not wait([answer], _SLICE_S).done:
        notice.check()
    return expect(answer.result(), m.Lent)


async def follow_clock(ask: Ask) -> None:
    """Keep the clock of this process in step with the coordinator's; returns if it is the same."""
    mine = clock_id()
    while True:
        try:
            measured = await _measure_offset(ask, mine)
        except errors.PacelineError as error:  # an old or absent coordinator: no offset
            log.debug("the coordinator's clock is not known: %s", error)
            measured = None
        if measured is not None:
            set_offset(measured.offset_s)
            if measured.error_s == 0.0:
                return
        await asyncio.sleep(_MEASURE_AGAIN_S)


async def _measure_offset(ask: Ask, mine: str) -> Offset:
    """Return how far the coordinator's clock is ahead of ours, whose id is `mine`."""
    pings: list[Ping] = []
    for _ in range(_PINGS):
        sent_s = time.monotonic()
        answer = expect(await ask(m.AskClock), m.ClockIs)
        if answer.clock_id == mine:
            return Offset(0.0, 0.0)
        pings.append(Ping(sent_s, time.monotonic(), answer.now_s))
    return estimate(pings)
