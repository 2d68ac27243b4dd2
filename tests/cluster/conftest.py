"""The test hosts, made once for the tests of a file; every test must leave them idle and whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster.ray_cluster import RayCluster
from support.cluster.slurm_cluster import SlurmCluster
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


@pytest.fixture(scope="module")
def slurm_hosts() -> Iterator[SlurmCluster]:
    """A Slurm cluster for all tests of a file: controller on a, nodes b and c."""
    with SlurmCluster("a", "b", "c") as made:
        yield made


@pytest.fixture
def slurm(slurm_hosts: SlurmCluster) -> Iterator[SlurmCluster]:
    """A Slurm cluster, controller on a, nodes b and c: idle and whole after each test."""
    yield slurm_hosts
    slurm_hosts.mend()
    slurm_hosts.wait_until_idle()


@pytest.fixture(scope="session")
def ray_hosts() -> Iterator[RayCluster]:
    """A Ray cluster that all files share, because it is slow to start: head on a, nodes b and c; d
    is no node. Every test must leave it free and whole."""
    with RayCluster("a", "b", "c", spare=("d",)) as made:
        yield made
