"""A connection whose other end is not there yet does not hold up others to the same process."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

from paceline.errors import PacelineError
from paceline.ps.replication.connector import Connector


def taken_until(
    connector: Connector[str], number: int
) -> list[tuple[Hashable, str | None | PacelineError]]:
    """Return what the connector formed, once it is this many."""
    taken: list[tuple[Hashable, str | None | PacelineError]] = []
    deadline_s = time.monotonic() + 10
    while len(taken) < number and time.monotonic() < deadline_s:
        taken += connector.take()
        time.sleep(0.001)
    return taken


def test_one_that_is_not_ready_delays_no_other_to_the_same_process() -> None:
    connector: Connector[str] = Connector()
    called = threading.Event()
    connector.arrange_when(0, "unused partition", lambda: "first", called.is_set)
    connector.arrange_when(0, "used partition", lambda: "second", lambda: True)
    assert taken_until(connector, 1) == [("used partition", "second")]
    called.set()
    assert taken_until(connector, 1) == [("unused partition", "first")]


def test_one_that_was_withdrawn_is_not_formed() -> None:
    connector: Connector[str] = Connector()
    called = threading.Event()
    for key in ("old", "current"):
        connector.arrange_when(0, key, lambda: "formed", called.is_set)
    connector.withdraw(lambda key: key == "old")
    called.set()
    assert taken_until(connector, 1) == [("current", "formed")]
    assert connector.take() == []
