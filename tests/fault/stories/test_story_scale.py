"""Row 34: more and fewer workers and servers while training goes on."""

from __future__ import annotations

import pytest
from story import Story


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pace", ["allreduce", "ps"])
def test_row_34_scale_up_and_down(story: Story, pace: str) -> None:
    servers = ("-s", "1") if pace == "ps" else ()
    story.start(*("-n", "2", *servers, "--pace", pace, "--min", "1", "--max", "6"), pause=0.01)
    story.wait_for_step(20)
    for size in (6, 1, 4):
        story.happens()
        story.command("scale", "-n", str(size))
        story.until(lambda size=size: story.world_size() == size, 60)
        story.expect_resume(60)
    story.expect_success(within_s=120)
    story.expect_agreement()
    story.expect_every_sample_once(epochs=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_row_34_servers_are_added_and_removed(story: Story) -> None:
    story.start(*("-n", "2", "-s", "1", "--max-servers", "3", "--pace", "ps"), pause=0.01)
    story.wait_for_step(20)
    story.happens()
    story.command("servers", "add", timeout_s=60)
    story.expect_line(r"server 1 .* joined", 30)
    story.wait_for_step(story.last_step() + 100)
    story.happens()
    story.command("servers", "remove", "1", timeout_s=60)
    story.expect_resume(3)
    story.expect_success(within_s=120)
    story.expect_agreement()
