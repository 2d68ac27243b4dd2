"""Rows 5, 6, 7 and 12: parameter servers that are killed or stopped, with and without copies."""

from __future__ import annotations

import signal

import pytest
from story import Story
from story_processes import is_alive

KILLED_S, STOPPED_S = 2.0, 5.0
REPLICATED = ("-s", "2", "--replicas", "2")


def expect_right(story: Story, pace: str) -> None:
    story.expect_success()
    if pace == "ps":
        story.expect_agreement()  # no update was lost or applied twice: the parameters are equal


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["ps", "ssp:3", "async"])
@pytest.mark.parametrize("victim", [0, 1])
def test_row_05_a_server_is_killed(story: Story, pace: str, victim: int) -> None:
    story.start("-n", "3", *REPLICATED, "--pace", pace)
    story.wait_for_step(30)
    story.kill(f"server {victim}")
    story.expect_detection(rf"server {victim} .* lost: killed by signal 9", KILLED_S)
    story.expect_resume(KILLED_S)
    expect_right(story, pace)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_row_05_both_servers_one_after_the_other(story: Story) -> None:
    """The second one dies when the first one's replacement holds a copy of everything."""
    story.start("-n", "2", *REPLICATED, "--pace", "ps")
    story.wait_for_step(30)
    for victim in (0, 1, 0):
        story.kill(f"server {victim}")
        story.expect_detection(rf"server {victim} .* lost: killed by signal 9", KILLED_S)
        story.expect_resume(KILLED_S)
        story.until(lambda: story.is_complete(workers=2, servers=2), 40, "a full set of copies")
    expect_right(story, "ps")


@pytest.mark.slow
def test_row_06_a_backup_is_killed(story: Story) -> None:
    """Of two servers each is the backup of the other's tables: with three, one is a backup only."""
    story.start("-n", "2", "-s", "3", "--replicas", "2", "--pace", "ps")
    story.wait_for_step(30)
    story.kill("server 2")
    story.expect_detection(r"server 2 .* lost: killed by signal 9", KILLED_S)
    story.expect_resume(KILLED_S)
    expect_right(story, "ps")


@pytest.mark.slow
def test_row_07_all_copies_are_lost(story: Story) -> None:
    story.start("-n", "2", *REPLICATED, "--pace", "ps")
    story.wait_for_step(20)
    story.kill("server 0", "server 1")
    story.expect_detection(r"every copy of partitions 0, 1, 2, 3 .* is lost", KILLED_S + 3)
    story.expect_end(128 + signal.SIGKILL, within_s=20)  # as the last one that was lost


@pytest.mark.slow
def test_row_12_a_primary_is_stopped_and_wakes_up_deposed(story: Story) -> None:
    story.start("-n", "2", *REPLICATED, "--pace", "ps")
    story.wait_for_step(20)
    pid = story.stop("server 0")
    story.expect_detection(r"server 0 .* lost", STOPPED_S)
    story.expect_resume(STOPPED_S)
    story.until(lambda: not is_alive(pid), 2)
    expect_right(story, "ps")
