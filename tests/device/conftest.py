"""Tests on the device `laggard`: built once, and run on several schedules.

A test takes the fixture `schedule` and gives it to `support.devices.run_on_device`.
"""

from __future__ import annotations

import os

import pytest

from support.devices import SCHEDULES, build_device

BUILD_S = 1200  # the first build takes minutes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" in metafunc.fixturenames:
        names = metafunc.config.getoption("--laggard-schedules", default=SCHEDULES)
        metafunc.parametrize("schedule", names.split(","))


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    if reason := build_device():
        pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.timeout(BUILD_S))
