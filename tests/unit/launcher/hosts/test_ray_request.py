"""What is asked of Ray, and the reports of `paceline run --on ray` that need no Ray."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import paceline as paceline_module
from paceline.errors import ConfigError, LaunchError
from paceline.launcher.engines.ray.connection import connect, explain
from paceline.launcher.engines.ray.request import RayRequest, is_for_ray, parse_address
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.hosts.placement import Placement
from paceline.launcher.job_size import ServerPlan, plan_changes
from paceline.runtime.process_names import ProcessName

NODES = [HostSlots("a", 2, server_slots=1), HostSlots("b", 0, server_slots=1)]


def test_addresses():
    assert parse_address("ray") == ""
    assert parse_address("ray://10.0.0.1:6379") == "10.0.0.1:6379"
    assert parse_address("ray://[fd00::1]:6379") == "[fd00::1]:6379"
    assert is_for_ray("ray://a:1") and is_for_ray("ray") and not is_for_ray("rays")
    assert not is_for_ray(None)


@pytest.mark.parametrize(
    "on", ["ray:", "ray://", "ray://a", "ray://a:b", "ray://a:0", "ray://a:70000", "ray:a:1"]
)
def test_wrong_addresses_say_what_to_type(on):
    with pytest.raises(ConfigError, match="ray://10.0.0.1:6379"):
        parse_address(on)


def test_resources():
    asked = RayRequest.parse("ray", "CPU=2,memory=1e9,disk=0.5", "spread", 5.0)
    assert asked.resources == {"CPU": 2.0, "memory": 1e9, "disk": 0.5}
    assert (asked.strategy, asked.wait_s) == ("spread", 5.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("CPU",), "NAME=AMOUNT"),
        (("CPU=x",), "NAME=AMOUNT"),
        (("CPU=1,CPU=2",), "each name once"),
        (("CPU=-1",), "at least 0"),
        (("CPU=nan",), "at least 0"),
        (("CPU=0",), "at least one resource"),
        (("GPU=1",), "does not divide"),
        (("=1",), "expected a name"),
        ((None, "scatter"), "pack"),
        ((None, None, 0.0), "above 0"),
        ((None, None, float("inf")), "above 0"),
    ],
)
def test_wrong_requests_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        RayRequest.parse("ray", *options)


def test_servers_are_where_ray_has_room_for_them():
    placed = Placement.fill(NODES, 2, 2, replicas=2)
    assert [placed.host_of(ProcessName(9, n, is_server=True)) for n in (0, 1)] == [0, 1]
    assert [placed.host_of(ProcessName(n, n)) for n in (0, 1)] == [0, 0]


def test_a_replacement_waits_for_room():
    placed = Placement.fill(NODES, 2, 2, replicas=2)
    server, worker = ProcessName(9, 1, is_server=True, is_newcomer=True), ProcessName(8, 1)
    running = [(0, 0), (0, 1), (1, 0)]
    assert placed.host_for_newcomer(server, [0], running) is None  # its node is lost
    assert placed.host_for_newcomer(worker, [0], running[:1]) == 0
    more = placed.with_slots(0, HostSlots("a", 2, server_slots=2))
    assert more.host_for_newcomer(server, [0], running) == 0


def test_a_job_on_ray_is_elastic():
    plan = plan_changes(num_workers=4, servers=ServerPlan(), is_elastic=True)
    assert plan is not None and (plan.min_workers, plan.max_workers) == (1, 4)
    plan = plan_changes(num_workers=4, servers=ServerPlan(), min_workers=3, is_elastic=True)
    assert plan is not None and plan.min_workers == 3


class OtherRay:
    """Ray as `explain` needs it."""

    __version__ = "2.60.0"


def test_what_ray_says_becomes_one_sentence():
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.12.1\n"
    assert "runs Ray 2.59.0 and Python 3.12.1" in explain(OtherRay, "", RuntimeError(text))
    assert "no Ray cluster runs" in explain(
        OtherRay, "", ConnectionError("Could not find any running Ray instance. Please")
    )
    assert "token" in explain(OtherRay, "a:1", RuntimeError("InvalidAuthToken: missing"))
    assert "cannot connect" in explain(OtherRay, "a:1", OSError("no\nmore"))


@pytest.mark.parametrize("address", ["ray://a:10001", "http://a:8265", "a"])
def test_addresses_of_another_kind(address):
    with pytest.raises(Exception, match="RAY_ADDRESS"):
        connect(OtherRay, "", "id", {"RAY_ADDRESS": address})


def test_an_address_where_nothing_listens():
    with pytest.raises(Exception, match="nothing answers at 127.0.0.1:9"):
        connect(OtherRay, "127.0.0.1:9", "id", {})


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_one_report(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = paceline("--on", "ray", "--log-dir", "none", str(tmp_path / "train.py"))
    assert done.returncode == 1, done.stderr
    assert "cannot import Ray" in done.stderr and "pip install 'ray[default]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--on", "rai"), "expected slurm, ray, kubernetes or local"),
        (("--on", "ray", "--hosts", "a:1"), "Ray chooses the nodes"),
        (("--on", "ray", "--detach"), "ray job submit"),
        (("--resources", "CPU=1"), "--resources is for --on ray"),
        (("--on", "ray", "--sync"), "--working-dir"),
    ],
)
def test_options_that_do_not_fit(tmp_path, words, text):
    (tmp_path / "train.py").write_text("")
    done = paceline(*words, str(tmp_path / "train.py"))
    assert done.returncode == 2 and text in done.stderr, done.stderr


def test_the_module_imports_neither_ray_nor_torch():
    code = "import sys, paceline; paceline.ray.run; print({'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_a_function_without_ray_one_report():
    with pytest.raises(LaunchError, match="cannot import Ray"):
        paceline_module.ray.run(print)
    with pytest.raises(ConfigError, match="does not divide"):
        paceline_module.ray.run(print, resources={"GPU": 1})
