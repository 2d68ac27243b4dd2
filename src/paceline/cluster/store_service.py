"""The store as members ask for it: requests in, replies out, waiting without tasks.

A wait is two callbacks, one for the keys and one for the deadline; whichever comes first takes
the other back. Runs in the coordinator's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TypeAlias

from paceline.cluster import messages as m
from paceline.cluster.store import Store
from paceline.errors import PacelineError, PeerTimeout

Value: TypeAlias = bytes | int | bool | None
Answer: TypeAlias = Callable[[Value | PacelineError], None]


class StoreService:
    """Answers the store requests of all members out of one table."""

    def __init__(self) -> None:
        self._store = Store()

    def handle(self, request: m.Request, answer: Answer) -> Callable[[], None] | None:
        """Answer now, or later and return a function that forgets the wait."""
        store = self._store
        if isinstance(request, m.StoreGet):
            key = request.key
            return self._when((key,), request.timeout_s, lambda: store.get(key), answer)
        if isinstance(request, m.StoreWait):
            return self._when(request.keys, request.timeout_s, lambda: None, answer)
        try:
            answer(self._now(request))
        except PacelineError as error:
            answer(error)
        return None

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
