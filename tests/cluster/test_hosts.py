"""The test hosts themselves: what they share, what they do not, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.cluster.host_group import make_directory
from support.cluster.ssh_cluster import SshCluster

pytestmark = pytest.mark.cluster
TESTS = Path(__file__).parents[1]


def test_each_host_has_its_own_name_home_and_address(cluster):
    cluster.network.wait_for_address6()
    for host in cluster.hosts:
        reached = cluster["a"].run(["ssh", host.name, "hostname; echo $HOME"])
        assert reached.stdout.splitlines() == [host.name, str(host.home)], reached.stderr
        by_address = cluster["b"].run(["ssh", host.address6, "hostname"])
        assert by_address.stdout == f"{host.name}\n", by_address.stderr


def test_a_killed_host_is_gone_and_can_be_booted_again(cluster):
    sleeper = cluster["a"].popen(["ssh", "c", "sleep 1000"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while not any("sleep 1000" in p.command for p in cluster["c"].processes()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cluster["c"].kill()
    assert sleeper.wait(10) == 255
    cluster.mend()
    assert cluster["a"].run(["ssh", "c", "hostname"]).stdout == "c\n"


def test_links_can_be_cut_in_one_direction_and_mended(cluster):
    ping = ["ssh", "-o", "ConnectTimeout=1", "b", "hostname"]
    cluster.network.mute(1, 0)
    assert cluster["a"].run(ping).returncode == 255
    assert cluster["c"].run(ping).returncode == 0
    cluster["b"].cut()
    assert cluster["c"].run(ping).returncode == 255
    cluster.mend()
    assert cluster["a"].run(ping).stdout == cluster["c"].run(ping).stdout == "b\n"


def test_processes_of_other_hosts_are_invisible(cluster):
    sleeper = cluster["b"].popen(["sleep", "1000"])
    pid = cluster["b"].pid_of(sleeper)
    assert [p.pid for p in cluster["b"].processes()] == [pid]
    assert cluster["a"].processes() == []
    os.kill(pid, signal.SIGKILL)
    sleeper.wait()


_KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from support.cluster.ssh_cluster import SshCluster
with SshCluster("x", "y") as cluster:
    x = cluster["x"]
    x.popen(["sleep", "1000"])
    print(*[x._root, cluster["y"]._root, cluster.directory], flush=True)
    time.sleep(1000)
"""


def test_a_killed_test_leaves_no_host():
    SshCluster("x")  # skips without root and packages
    code = _KILLED.format(tests=str(TESTS))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        *pids, directory = test.stdout.readline().split()
        test.kill()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, "the hosts outlive the test"
        time.sleep(0.02)
    make_directory().rmdir()
    assert not os.path.exists(directory)
