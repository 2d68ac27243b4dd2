"""Rows 1 to 11: processes that are killed or stopped."""

from __future__ import annotations

import pytest
from story import Story

KILLED_S = 2.0  # detection and resume after SIGKILL


@pytest.mark.parametrize("victim", [0, 1])
def test_row_01_a_worker_is_killed(story: Story, victim: int) -> None:
    story.start("-n", "3", "--min", "1", "--max", "3", steps=200)
    story.wait_for_step(20)
    story.kill(f"worker {victim}")
    story.expect_detection(rf"worker {victim} .* lost: killed by signal 9", KILLED_S)
    story.expect_resume(KILLED_S)
    story.expect_line(rf"worker {victim} .* joined", 30)
    story.expect_success()
    story.expect_agreement()
