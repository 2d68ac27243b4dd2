"""Rows 14 to 17: hosts that cannot reach each other any more."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from story_hosts import HostsStory
from story_wires import wires

PARTITION_S = 5.0
PAUSE_S = 0.02


@pytest.fixture
def story(tmp_path: Path, record_property) -> Iterator[HostsStory]:
    with wires("here", "a", "b", "c") as net:
        told = HostsStory(tmp_path, net)
        try:
            yield told
        finally:
            told.close()
            told.record(record_property)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("who", ["worker 1", "server 1"])
def test_row_11_a_process_on_another_host_is_stopped_for_3_s(story: HostsStory, who: str) -> None:
    """Its peers see by their connections that it is silent, and wait for it."""
    servers = ["b", "c"] if who == "server 1" else []
    pace = "ps" if servers else "allreduce"
    story.start_on(["a", "b", "c"], servers, 2 if servers else 1, pause=PAUSE_S, pace=pace)
    story.wait_for_step(20)
    pid = story.stop(who)
    time.sleep(3.0)
    assert story.go_on(pid)
    story.expect_resume(within_s=4.0)
    story.expect_survivors_to_finish(0, 1, 2)
    story.expect_agreement()
    story.expect_no_line(rf"{who} .* lost")


@pytest.mark.slow
@pytest.mark.root
def test_row_14_a_host_is_cut_off(story: HostsStory) -> None:
    story.start_on(["a", "b", "c"], pause=PAUSE_S)
    story.wait_for_step(20)
    story.happens()
    story.net.cut("b")
    story.expect_detection(r"worker 1 .* lost", PARTITION_S)
    story.expect_resume(PARTITION_S)
    cut_s = story.fault_s
    story.expect_survivors_to_finish(0, 2)
    story.expect_agreement_of(0, 2)
    story.expect_no_commit_of(1, since_s=cut_s + 0.5)  # what was under way may still have ended


@pytest.mark.slow
@pytest.mark.root
def test_row_14_a_server_is_cut_off(story: HostsStory) -> None:
    story.start_on(["a", "b"], ["b", "c"], replicas=2, pause=PAUSE_S, pace="ps")
    story.wait_for_step(20)
    story.happens()
    story.net.cut("c")
    story.expect_detection(r"server 1 .* lost", PARTITION_S)
    story.expect_resume(PARTITION_S)
    story.expect_survivors_to_finish(0, 1)
    story.expect_agreement()


@pytest.mark.slow
@pytest.mark.root
def test_row_15_the_copies_of_a_shard_cannot_reach_each_other(story: HostsStory) -> None:
    """Both reach the coordinator and the workers, so the primary accuses and one of them goes."""
    story.start_on(["a", "a"], ["b", "c"], replicas=2, pause=PAUSE_S, pace="ps")
    story.wait_for_step(20)
    story.happens()
    story.net.mute("b", "c")
    story.net.mute("c", "b")
    story.expect_detection(r"server \d .* lost", PARTITION_S)
    story.expect_resume(PARTITION_S)
    story.expect_survivors_to_finish(0, 1)
    story.expect_agreement()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("pace", ["allreduce", "ps"])
def test_row_16_packets_vanish_in_one_direction(story: HostsStory, pace: str) -> None:
    servers = ["c"] if pace == "ps" else []
    story.start_on(["a", "b", "c"], servers, pause=PAUSE_S, pace=pace)
    story.wait_for_step(20)
    story.happens()
    for other in ("here", "a", "c"):
        story.net.mute("b", other)
    story.expect_detection(r"worker 1 .* lost", PARTITION_S)
    story.expect_resume(PARTITION_S)
    story.expect_survivors_to_finish(0, 2)
    story.expect_agreement_of(0, 2)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_row_17_links_fail_one_by_one_and_heal(story: HostsStory, seed: int) -> None:
    """Short interruptions, shorter than the lease: nobody is lost, and all go on afterwards."""
    dice = random.Random(seed)
    story.start_on(["a", "b", "c"], pause=0.01)
    story.wait_for_step(20)
    hosts = ["a", "b", "c"]
    for _ in range(3):
        for host in dice.sample(hosts, 3):
            story.net.cut(host)
            time.sleep(dice.uniform(0.05, 0.4))
        for host in dice.sample(hosts, 3):
            story.net.mend(host)
            time.sleep(dice.uniform(0.05, 0.4))
        story.happens()
        story.expect_resume(10)
    story.expect_survivors_to_finish(0, 1, 2, within_s=120)
    story.expect_agreement()
