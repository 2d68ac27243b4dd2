"""Rows 1 to 13 and 25: processes that are killed, stopped or stuck."""

from __future__ import annotations

import os
import signal
import time

import pytest
from story import Story
from story_processes import is_alive, state_of

KILLED_S = 2.0  # for detection and resume after SIGKILL
STOPPED_S = 5.0  # after SIGSTOP
ELASTIC = ("--min", "1", "--max", "4")


def test_row_01_a_worker_is_killed(story: Story) -> None:
    story.start("-n", "3", *ELASTIC)
    story.wait_for_step(20)
    story.kill("worker 1")
    story.expect_detection(r"worker 1 .* lost: killed by signal 9", KILLED_S)
    story.expect_resume(KILLED_S)
    story.expect_success()
    story.expect_agreement()


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(0,), (0, 1), (2, 1)])
def test_row_01_workers_are_killed_and_replaced(story: Story, victims: tuple[int, ...]) -> None:
    story.start("-n", "3", *ELASTIC)
    story.wait_for_step(20)
    story.kill(*(f"worker {victim}" for victim in victims))
    for victim in victims:
        story.expect_detection(rf"worker {victim} .* lost: killed by signal 9", KILLED_S)
    story.expect_resume(KILLED_S)
    for victim in victims:
        story.expect_line(rf"worker {victim} .* joined", 30)
    story.expect_success()
    story.expect_agreement()


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["allreduce", "ps"])
def test_row_01_a_replacement_computes_the_same_bits(tmp_path_factory, pace: str) -> None:
    """With --on-loss replace the end is the same, to the bit, as if nothing had happened."""
    ends = []
    for victims in ((), (1, 0, 2)):
        story = Story(tmp_path_factory.mktemp("run"))
        servers = ("-s", "1") if pace == "ps" else ()
        try:
            story.start("-n", "3", *servers, "--pace", pace, "--on-loss", "replace", steps=120)
            for count, victim in enumerate(victims, 1):
                story.wait_for_step(20 * count)
                story.kill(f"worker {victim}")
                story.expect_line(rf"worker {victim} .* joined", 30)
            story.expect_end(0)
            ends.append({worker.end for worker in story.workers() if worker.end})
        finally:
            story.close()
    assert ends[0] == ends[1] and len(ends[0]) == 1, ends


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["ps", "ssp:3"])
def test_row_03_a_worker_is_killed_with_servers(story: Story, pace: str) -> None:
    story.start("-n", "3", "-s", "1", "--pace", pace, *ELASTIC)
    story.wait_for_step(20)
    story.kill("worker 1")
    story.expect_detection(r"worker 1 .* lost: killed by signal 9", KILLED_S)
    story.expect_resume(KILLED_S)
    story.expect_success()
    if pace == "ps":
        story.expect_agreement()


@pytest.mark.slow
def test_row_04_others_do_not_pause_for_a_lost_worker(story: Story) -> None:
    story.start("-n", "3", "-s", "1", "--pace", "async", *ELASTIC)
    story.wait_for_step(60)
    story.kill("worker 1")
    story.expect_detection(r"worker 1 .* lost: killed by signal 9", KILLED_S)
    story.expect_resume(1.0)
    story.expect_success()
    for worker in story.workers():
        if worker.number in (0, 2):
            before, after = story.rate_of(worker, -1.0, 0.0), story.rate_of(worker, 0.0, 1.0)
            assert after >= before / 2, f"{before:.1f} then {after:.1f} steps/s{story}"


@pytest.mark.slow
@pytest.mark.parametrize("servers", [(), ("-s", "2", "--replicas", "2", "--pace", "ps")])
def test_row_08_the_coordinator_is_killed(story: Story, servers: tuple[str, ...]) -> None:
    story.start("-n", "3", *servers, *ELASTIC)
    story.wait_for_step(30)
    before = story.pid("coordinator")
    story.kill("coordinator")
    story.expect_resume(0.5)  # training does not depend on it
    story.expect_detection(r"coordinator", KILLED_S)
    story.until(lambda: story.pid_or_none("coordinator") not in (None, before), 4)
    time.sleep(1)
    story.kill("worker 2")  # what it knows, it knows from its journal
    story.expect_detection(r"worker 2 .* lost: killed by signal 9", KILLED_S + 1)
    story.expect_resume(KILLED_S + 1)
    story.expect_success()
    story.expect_agreement()


@pytest.mark.slow
def test_row_09_everything_ends_with_the_launcher(story: Story) -> None:
    story.start("-n", "2", "-s", "2", "--replicas", "2", "--pace", "ps", *ELASTIC)
    story.wait_for_step(20)
    story.kill("launcher")
    story.expect_no_process_left(within_s=5)


@pytest.mark.slow
def test_row_09_a_detached_job_outlives_its_supervisor(story: Story) -> None:
    """Nobody watches for a while; whoever attaches supervises again, and losses are seen again."""
    story.start("-n", "2", *ELASTIC, "--detach")
    assert story.wait_for_end(60, of_all=False) == 0
    story.wait_for_step(20)
    story.happens()
    os.kill(story.supervisor(), signal.SIGKILL)
    story.expect_resume(KILLED_S)
    story.attach()
    story.wait_for_step(story.last_step() + 20)
    story.kill("worker 1")
    story.expect_detection(r"worker 1 .* lost", KILLED_S + 1)
    story.expect_resume(KILLED_S + 1)
    story.command("stop")
    story.expect_no_process_left(within_s=15)
    story.expect_agreement()


@pytest.mark.slow
def test_row_10_everything_is_killed_at_once(story: Story) -> None:
    everybody = ("launcher", "coordinator", "worker 0", "worker 1", "server 0")
    story.start("-n", "2", "-s", "1", "--pace", "ps", *ELASTIC)
    story.wait_for_step(20)
    story.kill(*everybody)
    story.expect_no_process_left(within_s=5)
    story.start("-n", "2", "-s", "1", "--pace", "ps", *ELASTIC, steps=10)  # from the beginning
    story.expect_success()


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["allreduce", "ps"])
def test_row_11_a_worker_is_stopped_for_3_s(story: Story, pace: str) -> None:
    servers = ("-s", "1") if pace == "ps" else ()
    story.start("-n", "3", *servers, "--pace", pace, *ELASTIC)
    story.wait_for_step(20)
    pid = story.stop("worker 1")
    time.sleep(3.0)
    assert story.go_on(pid)
    story.expect_resume(within_s=4.0)
    story.expect_success()
    story.expect_agreement()
    story.expect_no_line(r"worker 1 .* lost")
    assert len(story.workers()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["allreduce", "ps"])
def test_row_11_a_worker_is_stopped_for_ever(story: Story, pace: str) -> None:
    servers = ("-s", "1") if pace == "ps" else ()
    story.start("-n", "3", *servers, "--pace", pace, *ELASTIC)
    story.wait_for_step(20)
    pid = story.stop("worker 1")
    story.expect_detection(r"worker 1 .* lost", STOPPED_S)
    story.expect_resume(STOPPED_S)
    story.until(lambda: not is_alive(pid), 2)  # it cannot wake up and write
    story.expect_success()
    story.expect_agreement()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_row_13_a_worker_holds_the_gil(story: Story) -> None:
    """Its engine goes on, so it is alive for its peers; it is stuck, and given up after a while."""
    story.start("-n", "3", *ELASTIC)
    story.wait_for_step(20)
    story.tell(1, "hold-the-gil")
    story.expect_detection(r"worker 1 .* stuck", within_s=30)
    story.expect_line(r"File .*story_script.py.* in obey", within_s=5)  # its stacks
    story.expect_line(r"worker 1 .* lost: .*stuck", within_s=40)
    story.expect_resume(within_s=40)
    story.expect_success()
    story.expect_agreement()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT"])
def test_row_25_the_launcher_is_asked_to_end(story: Story, kind: str) -> None:
    number = signal.Signals[kind]
    story.start("-n", "3", "-s", "2", "--replicas", "2", "--pace", "ps", *ELASTIC)
    story.wait_for_step(20)
    story.kill("launcher", number=number)
    story.expect_end(128 + number, within_s=10)


@pytest.mark.slow
def test_names_of_processes_are_right(story: Story) -> None:
    story.start("-n", "2", "-s", "1", "--pace", "ps")
    story.wait_for_step(5)
    pids = {who: story.pid(who) for who in ("launcher", "worker 0", "worker 1", "server 0")}
    assert len(set(pids.values())) == 4 and all(map(state_of, pids.values())), pids
    assert pids["worker 1"] in [worker.pid for worker in story.workers() if worker.number == 1]
    assert os.getpid() not in pids.values()
    story.expect_success()
