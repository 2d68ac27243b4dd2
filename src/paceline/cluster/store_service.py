"""The store as members ask for it: requests in, replies out, waiting without tasks.

A wait is two callbacks, one for the keys and one for the deadline; whichever comes first takes
the other back. Runs in the coordinator's loop.

When the coordinator comes back after it was killed, members ask again what was not answered, though
it may have been done. So, with `note`, every change is noted together with its answer, and whoever
asks again with the same id gets that answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from paceline.cluster import messages as m
from paceline.cluster.journal import Answered, Forgotten, Stored, StoreEntry
from paceline.cluster.store import Store
from paceline.errors import PacelineError, PeerTimeout

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
