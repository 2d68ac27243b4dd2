"""Notices of long waits: when they come."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from paceline.control.wait_notice import WaitNotice, warn_s


@pytest.fixture
def _warns_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_WARN_S", "0.05")
    warn_s.cache_clear()
    yield
    warn_s.cache_clear()


@pytest.mark.usefixtures("_warns_early")
def test_a_wait_is_told_as_the_setting_says_and_then_ever_more_seldom() -> None:
    notice, began_s, told_s = WaitNotice("rank 0 waits for a bus"), time.monotonic(), list[float]()
    while len(told_s) < 3:
        if notice.check():
            told_s.append(time.monotonic() - began_s)
        time.sleep(0.005)
    assert all(told >= after for told, after in zip(told_s, (0.05, 0.15, 0.45), strict=True))
    assert told_s[0] < 2.0, "the setting is earlier than the default"
