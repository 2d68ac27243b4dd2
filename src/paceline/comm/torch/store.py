"""The job's key-value store as a torch.distributed Store.

With it torch's own code (subgroup bookkeeping, gloo's rendezvous) uses the authenticated control
plane instead of torch's TCPStore, which listens on all interfaces without authentication. torch
calls these methods from any thread, with names from two versions of its API.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from paceline.control.client.rendezvous import AnyAgent


class ControlStore(Store):
    """A torch Store whose keys live in the job's coordinator. Thread-safe."""

    def __init__(self, agent: AnyAgent) -> None:
        super().__init__()
        self._agent = agent

    def set(self, key: str, value: str | bytes) -> None:
        self._agent.store_set(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        return self._agent.store_get(key, self._timeout_s())

    def add(self, key: str, value: int) -> int:
        return self._agent.store_add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value; retry if another process changed it in the meantime."""
        added = _as_bytes(value)
        found = self._agent.store_compare_set(key, b"", added)
        if found == added:
            return
        while True:
            joined = found + added
            now = self._agent.store_compare_set(key, found, joined)
            if now == joined:
                return
            found = now

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)
        return self._agent.store_compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._agent.store_check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s() if timeout is None else timeout.total_seconds()
        self._agent.store_wait(keys, limit_s)

    def delete_key(self, key: str) -> bool:
        return self._agent.store_delete(key)

    def num_keys(self) -> int:
        return self._agent.store_num_keys()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> ControlStore:
        return self  # the agent is thread-safe

    # C++ calls these by their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _timeout_s(self) -> float:
        return self.timeout.total_seconds()  # type: ignore[attr-defined,no-any-return]


@functools.cache
def control_store(agent: AnyAgent) -> ControlStore:
    """Return the store of an agent. Cached, because C++ keeps only the C++ half of it alive."""
    return ControlStore(agent)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def fresh_prefix(store: Store, purpose: str, world_size: int) -> tuple[Store, str]:
    """Return a view of the store under a prefix that no earlier round of these processes used.

    Every rank increments a counter once per round, so a full count is a finished round. The second
    value is the counter's key; a rank that could not join undoes its count with
    `store.add(key, -1)`.
    """
    counter = f"paceline/{purpose}/joined"
    finished_rounds = (store.add(counter, 1) - 1) // world_size
    return PrefixStore(f"paceline/{purpose}/{finished_rounds}", store), counter
