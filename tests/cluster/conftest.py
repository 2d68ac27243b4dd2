"""The test hosts, made once for the tests of a file; every test must leave them idle and whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster.ssh_cluster import SshCluster


@pytest.fixture(scope="module")
def ssh_hosts() -> Iterator[SshCluster]:
    """Three hosts, a, b and c, with ssh between them, for all tests of a file."""
    with SshCluster("a", "b", "c") as made:
        yield made


@pytest.fixture
def cluster(ssh_hosts: SshCluster) -> Iterator[SshCluster]:
    """Three hosts, a, b and c: idle and whole before each test and after it."""
    yield ssh_hosts
    ssh_hosts.mend()
    ssh_hosts.wait_until_idle()
