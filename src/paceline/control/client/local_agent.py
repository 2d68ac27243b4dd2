"""The agent of a job that has one process: same interface, no socket, no thread.

With it nothing above the control plane needs to ask whether the job has one process or many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from paceline.control import messages as m
from paceline.control.client.requests import PoolCalls
from paceline.control.coordinator.store import Store, wait_error
from paceline.control.coordinator.work_pools import WorkPools
from paceline.control.member import Member, Membership
from paceline.control.messages import Changed, Presence
from paceline.errors import PacelineError
from paceline.observe.telemetry.events import Event


class LocalAgent(PoolCalls):
    """Joins at once, and keeps the store in this process. Thread-safe."""

    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.presence: dict[int, Presence] = {}
        self.on_presence: Callable[[Presence], None] | None = None
        self.on_changed: Callable[[Changed], None] | None = None
        self.on_over: Callable[[str], None] | None = None
        self.over: str | None = None
        self.ending: PacelineError | None = None
        self.is_attached = True
        self.unreachable_s = 0.0
        self._mu = threading.Lock()
        self._store = Store()  # guarded by: _mu, like the next two
        self._pools = WorkPools()
        self._requests = 0

    def join(self, member: Member, timeout_s: float = 60.0) -> Membership:  # noqa: ARG002
        self.membership = Membership(generation=1, members=(member,))
        return self.membership

    def look(self, timeout_s: float = 10.0) -> Membership:  # noqa: ARG002
        """Return the membership; a job of one process has no newcomers."""
        assert self.membership is not None, "the only process of a job joins first"
        return self.membership

    def ready(self, member: Member, timeout_s: float = 600.0) -> Membership:
        return self.join(member, timeout_s)

    def entered(self, generation: int) -> None:
        """Do nothing: there is one generation."""

    def report_unreachable(self, rank: int, why: str) -> None:
        """Do nothing: there is no other member."""

    def in_sync(self, partition: int, generation: int) -> None:
        """Do nothing: there are no copies."""

    def wait_for_generation(self, above: int, timeout_s: float) -> Membership | None:
        """Return the one membership if it is newer than `above`; else None after `timeout_s`."""
        found = self.membership
        if found is not None and found.generation > above:
            return found
        time.sleep(timeout_s)
        return None

    def report(self, event: Event) -> None:
        """Do nothing: there is no operator."""

    def leave(self, *, is_finished: bool = True, has_lost_peer: bool = False) -> None:
        """Do nothing: there is no coordinator."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _ask_soon(self, make: Callable[[int], Any], timeout_s: float) -> Future[m.Answer]:  # noqa: ARG002
        answer: Future[m.Answer] = Future()
        with self._mu:
            self._requests += 1
            request = make(self._requests)
            try:
                is_look = isinstance(request, m.LookAtPool)
                pools = self._pools
                answer.set_result(pools.look(request) if is_look else pools.take(0, request))
            except PacelineError as error:
                answer.set_exception(error)
        return answer

    def _send(self, message: Any) -> None:
        with self._mu:
            self._pools.settle(0, message)

    def store_set(self, key: str, value: bytes) -> None:
        with self._mu:
            self._store.set(key, value)

    def store_get(self, key: str, timeout_s: float = 300.0) -> bytes:
        self.store_wait((key,), timeout_s)
        with self._mu:
            return self._store.get(key)

    def store_add(self, key: str, amount: int) -> int:
        with self._mu:
            return self._store.add(key, amount)

    def store_compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._mu:
            return self._store.compare_set(key, expected, desired)

    def store_wait(self, keys: Iterable[str], timeout_s: float = 300.0) -> None:
        """Wait for another thread to set the keys; PeerTimeout names those that are not."""
        names = tuple(keys)
        arrived = threading.Event()
        with self._mu:
            cancel = self._store.when(names, arrived.set)
        if not arrived.wait(timeout_s):
            with self._mu:
                cancel()
                raise wait_error(self._store.missing(names), timeout_s)

    def store_check(self, keys: Iterable[str]) -> bool:
        with self._mu:
            return self._store.has(tuple(keys))

    def store_delete(self, key: str) -> bool:
        with self._mu:
            return self._store.delete(key)

    def store_num_keys(self) -> int:
        with self._mu:
            return len(self._store)
