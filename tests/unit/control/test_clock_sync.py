"""Every process of a job reads the coordinator's clock, whatever its own one shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from paceline.observe.telemetry import clock
from paceline.runtime.config import clock_id

_MEMBER = """
import sys, time
from paceline.control.client.agent import Agent
from paceline.control.member import Member
from paceline.observe.telemetry import clock

agent = Agent.connect(sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], 0)
agent.join(Member(0, "worker", "host", "here", 1, 0, "", ""))
deadline_s = time.monotonic() + 20
while clock.offset_s() == 0.0 and time.monotonic() < deadline_s and sys.argv[4] == "other":
    time.sleep(0.01)
print(clock.now_s(), time.monotonic(), clock.offset_s())
agent.close()
"""


@pytest.fixture
def read_clock(cluster, secret, job_id):
    """Start a member; return its job's clock, its own, and how far they are apart."""
    address = cluster.start(1).address

    def read(expects: str, *before: str, **env: str) -> list[float]:
        done = subprocess.run(
            [*before, sys.executable, "-c", _MEMBER, address, secret.hex(), job_id, expects],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [float(word) for word in done.stdout.split()]

    return read


def test_on_the_coordinators_host_the_clock_is_exactly_its_own(read_clock) -> None:
    job_s, own_s, offset_s = read_clock("same")
    assert offset_s == 0.0 and own_s >= job_s


def test_another_host_measures_its_offset(read_clock) -> None:
    before_s = time.monotonic()
    job_s, _, offset_s = read_clock("other", PACELINE_HOST_ID="elsewhere")
    assert offset_s != 0.0, "it was measured, though it is next to nothing"
    assert before_s < job_s < time.monotonic()


@pytest.mark.root
def test_a_shifted_clock_is_put_right(read_clock) -> None:
    shift = [shutil.which("unshare") or "unshare", "--time", "--fork", "--monotonic", "100000"]
    tried = subprocess.run([*shift, "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no time namespaces here: {tried.stderr!r}")
    before_s = time.monotonic()
    job_s, own_s, _ = read_clock("other", *shift)
    after_s = time.monotonic()
    assert own_s > after_s + 50_000, "the kernel has shifted it"
    assert before_s < job_s < after_s


def test_clocks_have_names() -> None:
    assert clock_id({}) == clock_id({})
    assert clock_id({"PACELINE_HOST_ID": "other"}) != clock_id({})
    assert clock.offset_s() == 0.0
