"""The store of a job: a key-value table with waiting, as torch.distributed's stores define it.

`Store` is the table, without any I/O. Values are bytes; `add` keeps a decimal number as text, which
is what torch's own stores do. A waiter is a function that is called once, when all of its keys
exist. Not thread-safe: one loop or lock owns a store.

`StoreService` answers the members' requests in the coordinator's loop, waiting without tasks: a
wait is two callbacks, one for the keys and one for the deadline; the first one takes the other
back. When the coordinator comes back after it was killed, members ask again what was not answered,
though it may have been done. So, with `note`, every change is noted together with its answer, and a
member that asks again with the same id gets that answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from paceline.control.coordinator.journal import Answered, Forgotten, Stored, StoreEntry
from paceline.control.transport import messages as m
from paceline.errors import PacelineError, PeerTimeout, UsageError


class Store:
    """The table and those who wait for keys in it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiters: dict[object, tuple[frozenset[str], Callable[[], None]]] = {}

    def set(self, key: str, value: bytes) -> None:
        is_new = key not in self._values
        self._values[key] = value
        if is_new:
            self._wake()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under key (absent counts as 0) and return the sum."""
        text = self._values.get(key, b"0")
        try:
            total = int(text) + amount
        except ValueError:
            raise UsageError(
                f"store_add on key {key!r}: its value {text[:40]!r} is not a number"
            ) from None
        self.set(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set key if its value is `expected` (b"" for absent); return the value that now counts."""
        if key not in self._values:
            if expected:
                return expected  # as torch's TCPStore: nothing is there, nothing is set
            self.set(key, desired)
        elif self._values[key] == expected:
            self._values[key] = desired
        return self._values[key]

    def items(self) -> list[tuple[str, bytes]]:
        return list(self._values.items())

    def has(self, keys: Collection[str]) -> bool:
        return all(key in self._values for key in keys)

    def missing(self, keys: Collection[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def __len__(self) -> int:
        return len(self._values)

    def when(self, keys: Collection[str], wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once all keys exist, at once if they do; returns a function that gives up."""
        ticket = object()
        self._waiters[ticket] = (frozenset(keys), wake)
        self._wake()

        def give_up() -> None:
            self._waiters.pop(ticket, None)

        return give_up

    def _wake(self) -> None:
        ready = [ticket for ticket, (keys, _) in self._waiters.items() if self.has(keys)]
        for ticket in ready:
            self._waiters.pop(ticket)[1]()


Value: TypeAlias = bytes | int | bool | None
Answer: TypeAlias = Callable[[Value | PacelineError], None]


_CHANGES = (m.StoreSet, m.StoreAdd, m.StoreCompareSet, m.StoreDelete)
_REMEMBERED = 256  # answers by member; it asks one after the other, from a few threads


class StoreService:
    """Answers the store requests of all members out of one table."""

    def __init__(self) -> None:
        self._store = Store()
        self.note: Callable[[StoreEntry], None] | None = None
        self._answers: dict[int, OrderedDict[int, Value]] = {}  # by rank and request

    def handle(
        self, request: m.Request, answer: Answer, rank: int = -1
    ) -> Callable[[], None] | None:
        """Answer now, or later and return a function that forgets the wait."""
        store = self._store
        if isinstance(request, m.StoreGet):
            key = request.key
            return self._when((key,), request.timeout_s, lambda: store.get(key), answer)
        if isinstance(request, m.StoreWait):
            return self._when(request.keys, request.timeout_s, lambda: None, answer)
        try:
            answer(
                self._once(request, rank) if isinstance(request, _CHANGES) else self._now(request)
            )
        except PacelineError as error:
            answer(error)
        return None

    def replay(self, entry: StoreEntry) -> None:
        """Take in what an earlier coordinator noted."""
        if isinstance(entry, Forgotten):
            self._answers.pop(entry.rank, None)
            return
        if isinstance(entry, Stored):
            if entry.value is None:
                self._store.delete(entry.key)
            else:
                self._store.set(entry.key, entry.value)
        self._remember(entry)

    def entries(self) -> Iterable[StoreEntry]:
        """Everything that a successor must know, in short."""
        for key, value in self._store.items():
            yield Stored(key, value)
        for rank, answers in self._answers.items():
            for request, reply in answers.items():
                yield Answered(rank, request, reply)

    def forget(self, rank: int) -> None:
        """A member is gone for good, and will not ask again."""
        if self._answers.pop(rank, None) is not None and self.note is not None:
            self.note(Forgotten(rank))

    def _once(
        self, request: m.StoreSet | m.StoreAdd | m.StoreCompareSet | m.StoreDelete, rank: int
    ) -> Value:
        if self.note is None:
            return self._now(request)
        known = self._answers.get(rank)
        if known is not None and request.id in known:
            return known[request.id]
        reply = self._now(request)
        value = self._store.get(request.key) if self._store.has((request.key,)) else None
        entry = Stored(request.key, value, rank, request.id, reply)
        self._remember(entry)
        self.note(entry)
        return reply

    def _remember(self, entry: Stored | Answered) -> None:
        if entry.rank >= 0:
            answers = self._answers.setdefault(entry.rank, OrderedDict())
            answers[entry.request] = entry.reply
            if len(answers) > _REMEMBERED:
                answers.popitem(last=False)

    def _now(self, request: m.Request) -> Value:
        store = self._store
        if isinstance(request, m.StoreSet):
            store.set(request.key, request.value)
            return None
        if isinstance(request, m.StoreAdd):
            return store.add(request.key, request.amount)
        if isinstance(request, m.StoreCompareSet):
            return store.compare_set(request.key, request.expected, request.desired)
        if isinstance(request, m.StoreCheck):
            return store.has(request.keys)
        if isinstance(request, m.StoreDelete):
            return store.delete(request.key)
        assert isinstance(request, m.StoreNumKeys), request
        return len(store)

    def _when(
        self,
        keys: Collection[str],
        timeout_s: float,
        value: Callable[[], Value],
        answer: Answer,
    ) -> Callable[[], None] | None:
        if self._store.has(keys):
            answer(value())
            return None

        def wake() -> None:
            timer.cancel()
            answer(value())

        def expire() -> None:
            give_up()
            answer(timed_out(self._store.missing(keys), timeout_s))

        def forget() -> None:
            timer.cancel()
            give_up()

        timer = asyncio.get_running_loop().call_later(timeout_s, expire)
        give_up = self._store.when(keys, wake)
        return forget


def timed_out(missing: list[str], waited_s: float) -> PeerTimeout:
    """The error of a wait in vain; also used by the store of a job that has one process."""
    return PeerTimeout(
        f"waited {waited_s:g} s for keys of the store that nobody set: {missing};"
        " a rank may have failed or taken another path"
    )
