"""A key-value table with waiting, as torch.distributed's stores define it, without any I/O.

Values are bytes; `add` keeps a decimal number as text, which is what torch's own stores do. A
waiter is a function that is called once, when all of its keys exist. Not thread-safe: one loop or
lock owns a store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.errors import UsageError


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
