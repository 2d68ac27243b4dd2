"""What all tests share: the fork server ends with the session, and runs leave no directories."""

from __future__ import annotations

import os

import pytest

# For this process and all that it starts; a test that wants a run directory says so.
os.environ["PACELINE_LOG_DIR"] = "none"


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    yield
    from support.ranks import ForkServer

    ForkServer.shut_down()
