"""The ssh engine against real sshds: what reaches the agent, its life line, and every failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from driver import HERE, Driver

from support.cluster.ssh_cluster import make_key

pytestmark = pytest.mark.cluster


@pytest.fixture
def driver(cluster, tmp_path: Path) -> Driver:
    return Driver(cluster, tmp_path)


def test_agents_start_on_every_host_with_directory_interpreter_and_invitation(driver):
    results = driver.run("b", "c", invitation={"ends": 7})
    assert [result["code"] for result in results] == [7, 7], results
    words = "the agent on host b ended with exit code 7: the agent has started"  # its last words
    assert results[0]["words"] == words
    for host in ("b", "c"):
        seen = driver.seen(host)
        assert seen["host"] == host
        assert seen["directory"] == str(driver.scratch)
        assert seen["python"] == sys.executable
        assert seen["environ"]["PYTHONPATH"] == str(HERE)


HOSTILE = 'it\'s "quoted" $(touch pwned) `x` \\n\n$HOME é ☃ * ; & | > %s %b !x ~'


def test_what_a_shell_could_change_arrives_unharmed(driver):
    directory = driver.scratch / HOSTILE.replace("/", "")
    directory.mkdir()
    driver.run(
        "b", place={"directory": str(directory)}, invitation={"ends": 1, "arguments": [HOSTILE]}
    )
    seen = driver.seen("b")
    assert seen["directory"] == str(directory)
    assert json.loads(seen["invitation"])["arguments"] == [HOSTILE]
    assert not list(directory.iterdir())


def test_the_secret_is_in_no_argument_and_no_environment(driver):
    secret = "c0ffee" * 8
    holder = driver.cluster["a"].popen(
        driver.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(driver.words("b", hold=True, invitation={"secret": secret}))
        holder.stdin.flush()
        assert "has started" in holder.stdout.readline()
        for host in driver.cluster.hosts:
            for process in host.processes():
                assert secret not in process.command
                assert secret not in str(dict(process.environ))
        os.kill(driver.cluster["a"].pid_of(holder), signal.SIGKILL)
    driver.cluster.wait_until_idle()


def test_a_killed_launcher_ends_its_agents(driver):
    holder = driver.cluster["a"].popen(
        driver.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(driver.words("b", "c", hold=True))
        holder.stdin.flush()
        for _ in range(2):
            assert "has started" in holder.stdout.readline()
        os.kill(driver.cluster["a"].pid_of(holder), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while len(list(driver.scratch.glob("seen.*.end"))) < 2:
        assert time.monotonic() < deadline, driver.cluster.left()
        time.sleep(0.02)


# -- failures -----------------------------------------------------------------------------------


def test_unknown_host(driver):
    result = driver.fail("nosuch")
    assert result["words"].startswith("host nosuch is unknown: its name has no address; check")


def test_connection_refused(driver):
    result = driver.fail("b:2222")
    assert "nothing accepts ssh connections at host b, port 2222" in result["words"]
    assert "Connection refused" in result["words"]


def test_host_that_does_not_answer(driver):
    driver.cluster["b"].cut()
    result = driver.fail("b")
    assert result["words"].startswith("host b does not answer at port 22; check that it is")
    assert result["after_s"] < 15


@pytest.fixture
def ssh_directory(driver):
    own = driver.cluster["a"].home / ".ssh"
    before = {path: path.read_bytes() for path in own.iterdir()}
    yield own
    for path in own.iterdir():
        path.unlink()
    for path, data in before.items():
        path.write_bytes(data)
        path.chmod(0o600)


def test_unknown_host_key(driver, ssh_directory):
    (ssh_directory / "known_hosts").write_text("")
    result = driver.fail("b")
    assert result["words"].startswith("the key of host b is not known here; run `ssh b` once")


def test_changed_host_key(driver, ssh_directory):
    other = make_key(driver.scratch / "other")
    (ssh_directory / "known_hosts").write_text(f"b {other}\n")
    result = driver.fail("b")
    assert "the key of host b is not the one in known_hosts" in result["words"]
    assert "`ssh-keygen -R b`" in result["words"]


def test_refused_key(driver, ssh_directory):
    (ssh_directory / "id_ed25519").unlink()
    make_key(ssh_directory / "id_ed25519")
    result = driver.fail("b")
    assert "host b refuses your key, or asks for a password" in result["words"]
    assert "Permission denied (publickey" in result["words"]


def test_broken_settings(driver, ssh_directory):
    (ssh_directory / "config").write_text("NoSuchOption yes\n")
    result = driver.fail("b")
    assert result["words"].startswith("ssh refuses its own settings; correct the file")


def test_settings_of_the_user_apply(driver, ssh_directory):
    address = driver.cluster["c"].address
    settings = f"Host short\n  HostName {address}\n  LocalForward 5555 localhost:22\n"
    (ssh_directory / "config").write_text(settings + "  RequestTTY force\n")
    (result,) = driver.run("short", invitation={"ends": 3})
    assert result["code"] == 3, result
    assert driver.seen("c")["host"] == "c"


def test_host_that_dies(driver):
    holder = driver.cluster["a"].popen(
        driver.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(driver.words("b", hold=True))
        holder.stdin.flush()
        assert "has started" in holder.stdout.readline()
        driver.cluster["b"].kill()
        (result,) = json.loads(holder.stdout.read())
    assert result["words"].startswith("the connection to host b broke;"), result


def test_missing_directory(driver):
    result = driver.fail("b", place={"directory": "/no/such place"})
    assert "host b has no directory /no/such place that you can enter" in result["words"]


def test_missing_interpreter(driver):
    result = driver.fail("b", place={"python": "/opt/none/bin/python"})
    assert "host b has no Python at /opt/none/bin/python" in result["words"]


def test_failing_activation(driver):
    result = driver.fail("b", place={"activation": "source /no/such/activate"})
    assert "on host b the activation line failed: 'source /no/such/activate'" in result["words"]
    assert "No such file" in result["words"]


def test_paceline_is_missing(driver):
    result = driver.fail("b", place={"module": "paceline.launcher.no_such_agent"})
    assert "cannot import Paceline (ModuleNotFoundError: No module named" in result["words"]
