"""The pytest plugin: tests that use the device run on several schedules and fail on every race.

A test takes the fixture `laggard_device`. It runs once for each schedule of `--laggard-schedules`
(default: two random seeds and lazy) and fails afterwards if the vector clocks found a race.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--laggard-schedules",
        default="1,2,lazy",
        help="schedules for tests on the device: seeds of random ones, or lazy (default: 1,2,lazy)",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    import sys

    if "laggard" in sys.modules:  # pytest's faulthandler has been put before our handler
        from laggard import _C

        _C.explain_crashes()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "laggard_schedule" in metafunc.fixturenames:
        names = metafunc.config.getoption("--laggard-schedules").split(",")
        metafunc.parametrize("laggard_schedule", names, indirect=True)


def schedule_named(name: str) -> AbstractContextManager[None]:
    """Return the schedule of that name: "lazy" or a seed."""
    import laggard

    return laggard.lazy_schedule() if name == "lazy" else laggard.random_schedule(int(name))


@pytest.fixture
def laggard_schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on one schedule."""
    with schedule_named(request.param):
        yield request.param


@pytest.fixture
def laggard_device(laggard_schedule: str) -> Iterator[str]:
    """Yield "laggard:0"; afterwards fail with both stacks if there was a race."""
    import laggard

    laggard.take_races()
    laggard.take_synchronizations()
    yield "laggard:0"
    if races := laggard.take_races():
        pytest.fail(f"{len(races)} races; the first:\n{races[0].report}", pytrace=False)
