"""Who is the first cause of a hang, from what processes tell about their waits."""

from __future__ import annotations

import pytest

from paceline.launcher.hang import HangWatch
from paceline.launcher.processes.output import StackFilter
from paceline.observe.telemetry.wait_reports import AGAIN_S, WaitReport, WaitReporter
from paceline.runtime.process_names import process_names


class Job:
    """Three workers and a server, of another host: nothing is known of their processes."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.watch = HangWatch(
            {name.rank: name for name in process_names(3, 1)},
            lambda _: None,
            self.said.append,
            30.0,
        )

    def look(self, *times_s: float) -> list[str]:
        """Look at each of these times; return what was said."""
        before = len(self.said)
        for now_s in times_s:
            self.watch.check(now_s)
        return self.said[before:]


@pytest.fixture
def job() -> Job:
    return Job()


def hear(job: Job, *events: WaitReport, at_s: float) -> None:
    for event in events:
        job.watch.on_event(event, at_s)


def test_a_wait_is_explained_when_it_is_long_and_only_once(job: Job) -> None:
    hear(job, WaitReport(0, "recv", (1,), 2.0), at_s=2.0)
    assert job.look(10.0, 14.0) == []
    hear(job, WaitReport(0, "recv", (1,), 28.0), at_s=28.0)
    assert job.look(29.0, 29.5) == []
    (said,) = job.look(30.5, 31.0, 31.5)
    assert said.startswith("rank 1 is missing: rank 0 has waited 31 s for it in recv; ")
    hear(job, WaitReport(0, "recv"), at_s=32.0)
    assert job.look(32.5, 33.0) == []
    hear(job, WaitReport(0, "recv", (1,), 31.0), at_s=70.0)
    assert len(job.look(70.5, 71.0)) == 1, "another wait for it is another hang"


def test_a_wait_that_has_ended_or_was_not_heard_of_for_long_is_none(job: Job) -> None:
    hear(job, WaitReport(0, "recv", (1,), 29.0), WaitReport(2, "recv", (1,), 29.0), at_s=29.0)
    hear(job, WaitReport(0, "recv"), at_s=30.0)
    assert job.look(29.0 + 3 * AGAIN_S, 30.0 + 3 * AGAIN_S) == []


def test_the_first_cause_is_at_the_end_of_the_chain(job: Job) -> None:
    hear(job, WaitReport(0, "barrier", (1,), 40.0), WaitReport(1, "recv", (2,), 38.0), at_s=40.0)
    (said,) = job.look(40.5, 41.0)
    words = "rank 2 is missing: rank 0 has waited 41 s for rank 1 in barrier, which waits for it in"
    assert said.startswith(f"{words} recv; ")


def test_all_who_are_missing_are_named(job: Job) -> None:
    hear(job, WaitReport(0, "barrier", (1, 2), 40.0), at_s=40.0)
    assert sorted(said[:6] for said in job.look(40.5, 41.0)) == ["rank 1", "rank 2"]
    assert job.look(41.5, 42.0) == []


def test_a_cause_must_be_the_same_at_two_looks(job: Job) -> None:
    """Processes tell at different times: rank 1 is about to say that it waits itself."""
    hear(job, WaitReport(0, "barrier", (1,), 40.0), at_s=40.0)
    assert job.look(40.1) == []
    hear(job, WaitReport(1, "recv", (2,), 40.0), at_s=40.2)
    assert [said[:6] for said in job.look(40.5, 41.0)] == ["rank 2"]


def test_a_server_knows_better_for_whom_a_worker_waits(job: Job) -> None:
    hear(job, WaitReport(0, "a request", (3,), 40.0), at_s=40.0)
    assert [said[:8] for said in job.look(40.5, 41.0)] == ["server 0"]
    hear(job, WaitReport(0, "table 'm'", (1,), 41.0, told_by=3), at_s=41.0)
    (said,) = job.look(41.5, 42.0)
    assert said.startswith("rank 1 is missing: rank 0 has waited 42 s for it in table 'm' at serv")


def test_a_cycle_is_a_deadlock(job: Job) -> None:
    hear(job, WaitReport(0, "recv", (1,), 40.0), WaitReport(1, "barrier", (0, 2), 40.0), at_s=40.0)
    assert "rank 2 is missing" in job.look(40.5, 41.0)[0]
    hear(job, WaitReport(2, "recv", (0,), 40.0), at_s=41.0)
    (said,) = job.look(41.5, 42.0)
    assert said.startswith("deadlock: rank 0 has waited 42 s for rank 1 in recv, which")


def test_only_changes_are_told() -> None:
    told: list[WaitReport] = []
    reporter = WaitReporter(told.append)
    reporter.update([WaitReport(0, "recv", (1,), 2.0)])
    reporter.update([WaitReport(0, "recv", (1,), 3.0)])
    reporter.update(
        [WaitReport(0, "recv", (1,), 2.0 + AGAIN_S), WaitReport(0, "barrier", (1, 2), 2.0)]
    )
    reporter.update([WaitReport(0, "barrier", (2,), 3.0)])
    reporter.update([])
    assert [(event.operation, event.for_ranks) for event in told] == [
        *(("recv", (1,)), ("barrier", (1, 2)), ("recv", (1,))),
        *(("barrier", (2,)), ("recv", ()), ("barrier", ())),
    ]


def test_threads_of_our_own_are_left_out_of_stacks() -> None:
    from paceline.control.transport import loop_thread
    from paceline.launcher.processes import run_script

    python = '  File "/lib/python3.11/threading.py", line 982 in _bootstrap'
    ours = [
        "Thread 0x07 (most recent call first):",
        f'  File "{loop_thread.__file__}", line 7 in f',
    ]
    idle = '  File "/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker'
    theirs = ["Thread 0x08 (most recent call first):", '  File "/home/load.py", line 3 in load']
    main = ["Current thread 0x09 (most recent call first):", '  File "/home/run.py", line 1 in g']
    lines = ["before", *ours, python, "", ours[0], idle, python, "", *theirs, python, "", *main]
    callers = [  # of a script in a fork of the template
        '  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed',
        f'  File "{run_script.__file__}", line 146 in run',
        '  File "<string>", line 2 in <module>',
    ]
    blocks = StackFilter()
    shown = [one for line in [*lines, *callers, "", "behind"] for one in blocks.feed(line)]
    assert shown == ["before", *theirs, python, *main, "", "behind"]
    assert list(blocks.feed(theirs[0])) == [] and blocks.is_holding
    assert list(blocks.finish()) == theirs[:1] and not blocks.is_holding
