"""Row 37: anybody is killed at any time, again and again, and training comes to its end.

How much of the computing was useful, and what the final loss is, bench/chaos measures.
"""

from __future__ import annotations

import random
import time

import pytest
from story import Story

KILLS = 12
WAYS = {
    "allreduce": (),
    "ps": ("-s", "2", "--replicas", "2", "--pace", "ps"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [1])
def test_row_37_random_kills(story: Story, way: str, seed: int) -> None:
    dice = random.Random(seed)
    who = ["worker 0", "worker 1", "worker 2", "coordinator"]
    who += ["server 0", "server 1"] if way == "ps" else []
    story.start("-n", "3", *WAYS[way], "--min", "1", "--max", "3", pause=0.01)
    story.wait_for_step(20)
    servers = 2 if way == "ps" else 0
    for _ in range(KILLS):
        # One fault at a time: copies are made again, and newcomers have joined.
        story.until(lambda: story.is_complete(3, servers), 60, "a complete job")
        time.sleep(dice.uniform(0.0, 0.5))
        story.kill(dice.choice(who))
        story.expect_resume(5)
    story.expect_success(within_s=120)
    story.expect_agreement()
