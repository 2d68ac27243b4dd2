"""What all tests share: the fork server ends with the session."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _fork_server():
    yield
    from support.ranks import ForkServer

    ForkServer.shut_down()
