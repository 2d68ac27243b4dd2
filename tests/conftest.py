"""What all tests share: the fork server, no directories of runs, and how they run side by side.

`make test` runs files of tests in three processes: most of them wait most of the time. The files
that take longest come first, so that no process is left alone with one of them in the end; the
many short ones of tests/unit fill the gaps.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

# For this process and all that it starts; a test that wants a run directory says so.
os.environ["PACELINE_LOG_DIR"] = "none"

ORDER = ("test_cpp.py", "fault", "examples", "multiprocess", "equivalence", "conformance")


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    yield
    from support.ranks import ForkServer

    ForkServer.shut_down()


def _is_side_by_side(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # a process of pytest-xdist


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_side_by_side(config):
        tests = Path(__file__).parent
        items.sort(key=lambda item: _place(item.path.relative_to(tests).parts[0]))


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


# Outside of everything else: the time for which a test waits for its turn is not the test's.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not _is_side_by_side(item.config):
        return (yield)
    from support.turns import turn

    # Every process has a directory in one that belongs to the session.
    directory = Path(item.config._tmp_path_factory.getbasetemp()).parent  # type: ignore[attr-defined]
    with turn(directory, alone=item.get_closest_marker("serial") is not None):
        return (yield)
