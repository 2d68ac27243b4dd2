"""The pytest plugin: one run for each schedule, and a failure for each race."""

from __future__ import annotations

PROGRAM = """
import torch

def add(device, wait):
    y = torch.ones(4, device=device) * 3
    side = torch.Stream(device)
    if wait:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        y + 1
        y.record_stream(side)
    side.synchronize()

def test_right(laggard_device):
    add(laggard_device, True)

def test_wrong(laggard_device):
    add(laggard_device, False)
"""


def test_a_test_with_a_race_fails_on_every_schedule(pytester):
    pytester.makepyfile(PROGRAM)
    arguments = ["-p", "laggard.pytest_plugin", "--laggard-schedules", "7,lazy"]
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=4, errors=2)  # the race is found after the body
    result.stdout.fnmatch_lines(["*1 races; the first:*", "*without waiting for it*"])
