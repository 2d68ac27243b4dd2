"""What a member asks of the coordinator: the store's operations, and portions of pools of work.

Each call is a request and its answer. Portions are asked for ahead of time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from paceline import errors
from paceline.control.transport import messages as m
from paceline.control.wait_notice import WaitNotice

ANSWER_S = 10.0  # a coordinator that is alive answers within this

T = TypeVar("T")


class StoreCalls(ABC):
    """Asks the coordinator's store. All methods block, and carry their own deadline."""

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


def expect(value: object, kind: type[T]) -> T:
    """Check that the coordinator answered the question that was asked."""
    if not isinstance(value, kind):
        raise errors.ProtocolError(
            f"the coordinator answered with {type(value).__name__}, expected {kind.__name__};"
            " install the same Paceline version everywhere"
        )
    return value


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
