"""Skip tests that do not apply on the test device, where the suites run with TEST_ON_DEVICE.

not_on_device.txt has a line for each: a file, or a test in it, and the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.on_device import use_the_same_attention

HERE = Path(__file__).resolve().parent
TABLE = HERE / "not_on_device.txt"


def reasons() -> dict[str, str]:
    """Return by file, or by file and test, why it does not run on the device."""
    lines = [line for line in TABLE.read_text().splitlines() if line and line[0] != "#"]
    pairs = [line.partition(" -- ") for line in lines]
    assert all(reason.strip() for _, _, reason in pairs), f"a line of {TABLE} has no reason"
    return {name: reason for name, _, reason in pairs}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("TEST_ON_DEVICE"):
        return
    use_the_same_attention()
    known = reasons()
    for item in items:
        if item.path.parent == HERE:
            name, _, test = item.nodeid.rpartition("/")[2].partition("::")
            of_test = f"{name}::{test.partition('[')[0]}"
            if reason := known.get(name) or known.get(of_test) or known.get(f"{name}::{test}"):
                item.add_marker(pytest.mark.skip(reason=f"not on the device: {reason}"))
