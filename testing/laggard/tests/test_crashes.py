"""Closed memory: a touch ends the process, and says which Python line did it."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from pathlib import Path

import crashing
import pytest

PROGRAM = Path(crashing.__file__)


def run(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("host_touches_device_memory", "touched device memory"),
        ("host_reads_a_copy_early", crashing.CLOSED),
        ("host_overwrites_a_source_early", crashing.CLOSED),
        ("host_waits_for_the_wrong_event", crashing.CLOSED),
        ("host_reads_registered_memory_early", crashing.CLOSED),
    ],
)
def test_a_touch_crashes_with_the_python_line(name, mistake):
    lines, first = inspect.getsourcelines(getattr(crashing, name))
    [crash] = [first + i for i, line in enumerate(lines) if "CRASH" in line]
    ended = run(name)
    assert ended.returncode == -signal.SIGSEGV
    assert mistake in ended.stderr
    assert f"line {crash} in {name}" in ended.stderr


@pytest.mark.parametrize(
    "name", ["a_forked_child_uses_the_device", "a_forked_child_may_use_an_unused_device"]
)
def test_a_forked_child_has_no_device_if_its_parent_used_it(name):
    assert run(name).returncode == 42
