"""Rows 18, 21, 27, 33 and 35: too little memory, time, descriptors or processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from story import Story
from story_limits import control_group, enter

ELASTIC = ("--min", "1", "--max", "4")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("pace", ["async", "ssp:3"])
def test_row_18_a_starved_worker_holds_up_nobody_else(story: Story, pace: str) -> None:
    """With a tenth of a core; ssp lets the others run ahead as far as the bound allows."""
    with control_group("cpu", cfs_period_us=100_000, cfs_quota_us=10_000) as group:
        story.start("-n", "3", "-s", "1", "--pace", pace, *ELASTIC)
        story.wait_for_step(40)
        enter(group, story.pid("worker 1"))
        story.happens()
        time.sleep(4)
        first, _, third = (story.newest(number) for number in (0, 1, 2))
        if pace == "async":
            for worker in (first, third):
                before, after = story.rate_of(worker, -1.0, 0.0), story.rate_of(worker, 1.0, 3.0)
                assert after > 0.5 * before, f"{before:.1f} then {after:.1f} steps/s{story}"
        story.expect_no_line(r"lost:")


@pytest.mark.slow
@pytest.mark.root
def test_row_18_a_straggler_is_named(story: Story) -> None:
    with control_group("cpu", cfs_period_us=100_000, cfs_quota_us=10_000) as group:
        story.start("-n", "2", *ELASTIC, pause=0, width=512, batch=64)
        story.wait_for_step(10)
        enter(group, story.pid("worker 1"))
        story.happens()
        story.expect_detection(r"the other workers wait for worker 1\b", within_s=20)
        story.expect_success(within_s=90)
        story.expect_no_line(r"lost:")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.serial
def test_row_21_a_worker_runs_out_of_memory(story: Story) -> None:
    with control_group("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(1500 << 20))
        story.start("-n", "3", *ELASTIC)
        story.wait_for_step(20)
        enter(group, story.pid("worker 1"))
        time.sleep(1)  # the launcher looks a few times per second where its processes are
        story.tell(1, "eat 3000")
        pattern = r"worker 1 .* lost: killed by signal 9, memory cgroup limit 1\.46 GiB reached"
        story.expect_detection(pattern, within_s=10)
        story.expect_line(r"worker 1 .* joined", 30)
        story.expect_success()
        story.expect_agreement()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pace", ["allreduce", "ps"])
def test_row_33_four_times_more_work_than_cores(story: Story, pace: str) -> None:
    """A minute of it: nobody is evicted, whoever is slow."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(4 * (os.cpu_count() or 2))
    ]
    servers = ("-s", "2", "--replicas", "2") if pace == "ps" else ()
    try:
        story.start("-n", "4", *servers, "--pace", pace, *ELASTIC)
        story.wait_for_step(5, within_s=200)
        story.happens()
        time.sleep(60)
        story.expect_resume(70)
        story.expect_no_line(r"lost:|evict")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    story.kill("launcher", number=signal.SIGTERM)
    story.expect_end(128 + signal.SIGTERM, within_s=20)
    story.expect_agreement()


@pytest.mark.slow
def test_row_35_no_process_can_be_started_any_more(story: Story) -> None:
    """A limit that the launcher meets in the middle of starting: no half job stays."""
    with control_group("pids", max=14) as group:
        story.prefix = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        story.start("-n", "12", steps=10)
        story.happens()
        story.expect_detection(r"could not be started|cannot|Resource temporarily", within_s=30)
        story.expect_end_with_error(within_s=60)


@pytest.mark.slow
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
            story.start("-n", "2", *(("-s", "1", "--pace", "ps") if round_number % 2 else ()))
            story.wait_for_step(5)
            pids = [story.pid(who) for who in ("launcher", "worker 0", "worker 1")]
            story.happens()
            for pid in pids if round_number % 3 == 0 else pids[:1]:
                os.kill(pid, signal.SIGKILL)
            story.expect_no_process_left(within_s=5)
        finally:
            story.close()
