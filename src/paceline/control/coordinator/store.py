"""The job's key-value store, with waiting, as torch.distributed's stores define it.

`Store` is the table, without any I/O. Values are bytes; `add` keeps a decimal number as text, as
torch's own stores do. A waiter is a function that is called once, when all of its keys exist. Not
thread-safe: one loop or lock owns a store.

`StoreService` answers the members' requests in the coordinator's loop, without a task per wait: a
wait is two callbacks, one for the keys and one for the deadline; the first to run cancels the
other. After a restart of the coordinator, members repeat unanswered requests, although the previous
coordinator may have handled them. So, with `note`, every change is noted together with its answer,
and a repeated request with the same id gets that answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

import msgspec

from paceline.control import messages as m
from paceline.errors import PacelineError, PeerTimeout, UsageError


class Stored(msgspec.Struct, frozen=True, tag=True):
    """Journal entry: a change of the store, and the answer to the request for it."""

    key: str
    value: bytes | None  # None: deleted
    rank: int = -1  # -1: the request will not be repeated
    request: int = 0
    reply: bytes | int | bool | None = None


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Journal entry: an answer without its change, in journals that were shortened."""

    rank: int
    request: int
    reply: bytes | int | bool | None


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    """Journal entry: a member is gone for good and will not repeat requests."""

    rank: int


StoreEntry: TypeAlias = Stored | Answered | Forgotten


class Store:
    """The table, and the waiters for its keys."""

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
        if not -(1 << 63) <= total < 1 << 63:  # no answer could hold it
            raise UsageError(f"store_add on key {key!r:.80}: the sum has more than 64 bits")
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
        """Call `wake` once all keys exist, at once if they do; return a function that cancels."""
        ticket = object()
        self._waiters[ticket] = (frozenset(keys), wake)
        self._wake()

        def cancel() -> None:
            self._waiters.pop(ticket, None)

        return cancel

    def _wake(self) -> None:
        ready = [ticket for ticket, (keys, _) in self._waiters.items() if self.has(keys)]
        for ticket in ready:
            self._waiters.pop(ticket)[1]()


Value: TypeAlias = bytes | int | bool | None
Answer: TypeAlias = Callable[[Value | PacelineError], None]


_CHANGES = (m.StoreSet, m.StoreAdd, m.StoreCompareSet, m.StoreDelete)
_REMEMBERED = 256  # answers per member; its few threads send one request after the other


class StoreService:
    """Answers the store requests of all members out of one table."""

    def __init__(self) -> None:
        self._store = Store()
        self.note: Callable[[StoreEntry], None] | None = None
        self._answers: dict[int, OrderedDict[int, Value]] = {}  # by rank and request

    def handle(
        self, request: m.Request, answer: Answer, rank: int = -1
    ) -> Callable[[], None] | None:
        """Answer now, or later and return a function that cancels the wait."""
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

    def clear(self) -> None:
        """Forget all values: the job begins again."""
        self._store, self._answers = Store(), {}

    def replay(self, entry: StoreEntry) -> None:
        """Apply an entry that an earlier coordinator noted."""
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
        """Return all that a restarted coordinator must know, in short form."""
        for key, value in self._store.items():
            yield Stored(key, value)
        for rank, answers in self._answers.items():
            for request, reply in answers.items():
                yield Answered(rank, request, reply)

    def forget(self, rank: int) -> None:
        """Forget the answers to a member that is gone for good."""
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
            cancel_wait()
            answer(wait_error(self._store.missing(keys), timeout_s))

        def cancel() -> None:
            timer.cancel()
            cancel_wait()

        timer = asyncio.get_running_loop().call_later(timeout_s, expire)
        cancel_wait = self._store.when(keys, wake)
        return cancel


def wait_error(missing: list[str], waited_s: float) -> PeerTimeout:
    """Return the error of a wait that timed out."""
    return PeerTimeout(
        f"waited {waited_s:g} s for keys of the store that no rank set: {missing};"
        " a rank may have failed or taken another path"
    )
