"""Rows 18, 21, 27, 33 and 35: too little memory, time, descriptors or processes."""

from __future__ import annotations

import os
import signal

import pytest
from story import Story
from story_limits import control_group


def test_row_35_no_process_can_be_started_any_more(story: Story) -> None:
    """A limit that the launcher meets in the middle of starting: no half job stays."""
    with control_group("pids", max=14) as group:
        story.prefix = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        story.start("-n", "12", steps=10)
        story.happens()
        story.expect_detection(r"could not be started|cannot|Resource temporarily", within_s=30)
        story.expect_end_with_error(within_s=60)


def test_row_35_no_descriptor_is_left(story: Story) -> None:
    story.prefix = ["prlimit", "--nofile=24:24"]
    story.start("-n", "8", steps=10)
    story.happens()
    story.expect_detection(r"[Dd]escriptor|Too many open files", within_s=30)
    story.expect_end_with_error(within_s=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_row_27_jobs_that_are_killed_again_and_again(tmp_path_factory) -> None:
    """The launcher, or everybody, dies in the middle of training; twenty times."""
    for round_number in range(20):
        story = Story(tmp_path_factory.mktemp("round"))
        try:
            story.start(
                "-n", "2", *(("-s", "1", "--pace", "ps") if round_number % 2 else ()), steps=500
            )
            story.wait_for_step(5)
            pids = [story.pid(who) for who in ("launcher", "worker 0", "worker 1")]
            story.happens()
            for pid in pids if round_number % 3 == 0 else pids[:1]:
                os.kill(pid, signal.SIGKILL)
            story.expect_no_process_left(within_s=5)
        finally:
            story.close()
