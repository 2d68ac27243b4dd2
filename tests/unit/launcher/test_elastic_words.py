"""What people read about an elastic job: lines, the summary, status, the table of servers."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from paceline.cli.job_commands import describe, server_table
from paceline.control.member import Member, Membership
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import Reservation
from paceline.control.messages import LossKind, Presence, Wanted
from paceline.control.operator_messages import Status
from paceline.launcher.elastic.event_log import EventLog, hottest
from paceline.launcher.job_size import ElasticPlan, ServerPlan, plan_changes
from paceline.launcher.outcome import JobOutcome
from paceline.launcher.processes.process import ExitStatus
from paceline.launcher.processes.table import ProcessResult
from paceline.observe.display.board import Board
from paceline.observe.telemetry.events import (
    BackupCaughtUp,
    PartitionsMoved,
    ProgressReport,
    Promoted,
    Resumed,
)
from paceline.runtime.machine import MemoryInfo, OomCount
from paceline.runtime.process_names import ProcessName, process_names


def _member(rank: int, number: int, role: str = "worker", pid: int = 0) -> Member:
    return Member(rank, role, "h", "b", pid or 4000 + rank, number, "", "", number)


def _event_log(unit_size: int = 1, **options: object) -> EventLog:
    servers = ServerPlan(count=2, replicas=2)
    plan = plan_changes(num_workers=4, servers=servers, min_workers=2, **options)  # type: ignore[arg-type]
    assert isinstance(plan, ElasticPlan)
    log = EventLog(plan, unit_size)
    workers = [_member(n, n) for n in range(4)]
    servers_ = (_member(4, 0, "server"), _member(5, 1, "server"))
    log.take(Membership(1, (*workers, *servers_), ((4, 5), (5, 4))))
    return log


def _text(line: str | None) -> str:
    assert line is not None
    clock, _, text = line.partition(" ")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock)
    return text


def test_what_follows_from_a_loss_is_told_as_it_happens_and_whole_at_the_end() -> None:
    log = _event_log()
    log.progressed(412, 9.0)
    why = "killed by signal 9, memory cgroup limit 2.0 GB reached"
    line = _text(log.lost(3, why, LossKind.KILLED, 10.0))
    assert line == f"worker 3 (host b, pid 4003) lost: {why}; continuing with 3 workers"
    assert log.lost(3, "its connection ended", LossKind.ENDED, 10.1) is None, "once is enough"
    again = _text(log.resumed(Resumed(0, 412, 3, (3,), 0.11, True)))
    assert again == "step 412 exchanged again with 3 workers (0.1 s)"
    log.progressed(412, 10.2)  # another worker's report of the same step
    log.progressed(415, 10.6)
    workers = [_member(n, n) for n in range(3)]
    log.take(Membership(2, (*workers, _member(17, 3, pid=4242))))
    joined = _text(log.joined(17, 10.8))
    assert joined == "worker 3 (host b, pid 4242) joined at step 415, 0.8 s after the loss"
    count, whole = log.summary()
    assert count == "paceline: 1 loss (worker 3), 1 replaced; 0.6 s in all until the next step"
    assert _text(whole) == (
        f"worker 3 (host b, pid 4003) lost: {why}; step 412 exchanged again with 3 workers (0.1 s);"
        " replacement (pid 4242) joined at step 415 (0.8 s)"
    )
    more = _text(log.resumed(Resumed(0, 417, 4, (), 0.04, False)))
    assert more == "4 workers from step 417 (0.0 s)"


def test_what_follows_is_said_only_where_it_is_certain() -> None:
    replace = _event_log(on_loss="replace")
    assert "the other workers hold their step until" in _text(
        replace.lost(1, "x", LossKind.ENDED, 0.0)
    )
    shrink = _event_log()
    assert _text(shrink.lost(4, "x", LossKind.ENDED, 0.0)).endswith(
        "; other servers have its tables"
    )
    assert _text(shrink.lost(5, "x", LossKind.ENDED, 0.0)).endswith("lost: x"), (
        "it had the last copy"
    )
    for rank in (0, 1):
        assert "continuing" in _text(shrink.lost(rank, "x", LossKind.ENDED, 0.0))
    assert _text(shrink.lost(2, "x", LossKind.ENDED, 0.0)).endswith("lost: x"), "fewer than --min"
    assert shrink.summary()[0].startswith("paceline: 5 losses (server 0, server 1, worker 0, worke")


def test_silence_and_partitions_have_lines() -> None:
    log = _event_log()
    silent = Presence(2, "silent", "no heartbeat for 2.1 s: its process runs")
    words = "worker 2 (host b, pid 4002) is silent: no heartbeat for 2.1 s: its process runs"
    assert _text(log.presence(silent)) == words
    lines = [
        _text(log.happened(event))
        for event in (
            Promoted(1, (0, 2), 2),
            BackupCaughtUp(2, (1,), 3),
            PartitionsMoved(0, 2, (3, 1), 4),
        )
    ]
    assert lines == [
        "server 1 is now primary of partitions 0, 2",
        "server 2 has a copy of partition 1",
        "partitions 1, 3 moved from server 0 to server 2",
    ]


def _status(**more: object) -> Status:
    members = (_member(0, 0), _member(7, 1), _member(2, 0, "server"), _member(3, 1, "server"))
    membership = Membership(5, members, ((2, 3), (2, 3), (3, 2), (2,)))
    policy = Policy(
        num_workers=2, num_servers=2, is_elastic=True, replicas=2, num_partitions=4, max_workers=4
    )
    return Status(1, policy, membership, **more)  # type: ignore[arg-type]


def test_the_status_names_everybody() -> None:
    told = _status(
        wanted=(Wanted("worker", 2),),
        reserved=(Reservation(9, "worker", 3),),
        states={7: "silent: no heartbeat for 3.0 s"},
        not_adopted=(0,),
    )
    assert describe(told) == [
        "generation 5; 1 to 4 workers, on loss shrink",
        "  worker 0 (rank 0, host b, pid 4000): not yet in generation 5",
        "  worker 1 (rank 7, host b, pid 4007): silent: no heartbeat for 3.0 s",
        "  server 0 (rank 2, host b, pid 4002)",
        "  server 1 (rank 3, host b, pid 4003)",
        "  worker 3 is on its way",
        "  worker 2 is wanted",
        "partitions 3 have fewer than 2 copies",
    ]
    assert describe(_status(over="no worker is left")) == ["over: no worker is left"]
    forming = Status(1, told.policy, None, (1, 3))
    assert describe(forming) == ["forming: waiting for ranks 1, 3"]


def test_the_table_of_servers_shows_who_is_busy() -> None:
    assert server_table(_status(), {2: 0.754}) == [
        "server  load  answers for           backup of",
        "     0  75 %  0,1,3                 2",
        "     1     -  2                     0,1",
    ]
    assert hottest({0: 9.0}) == [] and hottest({0: 0.0, 1: 0.0}) == []
    hot = "paceline: hot server: 2, with 80 % of the processor time of 3 servers"
    assert hottest({0: 1.0, 1: 1.0, 2: 8.0}) == [hot]
    assert hottest({0: 5.0, 1: 6.0})[0].startswith("paceline: busiest server: 1, with 55 %")


def test_a_replacement_goes_on_in_the_row_of_its_predecessor() -> None:
    board = Board(process_names(2))
    board.on_event(ProgressReport(1, 40, {"loss": 2.0}), 1.0)
    board.on_event(ProgressReport(0, 50), 1.0)
    assert board.line(1.0).startswith("steps 40 to 50")
    board.set_state(1, "killed by SIGKILL (killed)")
    assert board.line(1.0) == "step 50", "who is lost has no step any more"
    board.add(ProcessName(5, 1, is_newcomer=True))
    board.on_event(ProgressReport(1, 99), 2.0)  # a late word of the dead
    board.on_event(ProgressReport(5, 42), 2.0)
    rows = board.rows(2.0)
    assert [(row.label, row.step, row.state) for row in rows] == [
        ("0", 50, "running"),
        ("1", 42, "running"),
    ]
    board.add(ProcessName(6, 2, is_newcomer=True))
    assert len(board.rows(2.0)) == 3
    board.remove(ProcessName(6, 2, is_newcomer=True))
    assert len(board.rows(2.0)) == 2


def test_a_job_that_could_not_go_on_shows_its_last_loss() -> None:
    last = ProcessResult(
        name=ProcessName(9, 1),
        pid=4242,
        status=ExitStatus(None, signal.SIGKILL),
        ran_s=3.25,
        stderr_tail=("last words",),
    )
    nothing = MemoryInfo(total_bytes=0, available_bytes=0, limit_bytes=None, peak_bytes=None)
    outcome = JobOutcome(
        results=[],
        first=None,
        interrupted_by=None,
        wall_s=1.0,
        oom_before=OomCount(0, 0),
        oom_after=OomCount(0, 0),
        memory=nothing,
        over="1 worker is left, expected at least 2 (--min)",
        lost=[last],
    )
    assert outcome.exit_code == 137 and "failed after" in outcome.closing_line()
    assert outcome.failure_text(Path("logs")) == (
        "paceline: the job ended: 1 worker is left, expected at least 2 (--min)\n"
        "paceline: the last loss was worker 1: killed by SIGKILL (killed) after 3.2 s (pid 4242,"
        " whole output in logs/rank-1.log)\n"
        "  | last words"
    )


def test_a_unit_is_lost_and_replaced_in_the_words_of_one_loss() -> None:
    log = _event_log(unit_size=2)
    assert log.lost(0, "a mate was killed", LossKind.RETIRED, 10.0) is None
    text = _text(log.lost(1, "killed by signal 9", LossKind.KILLED, 10.0))
    assert text == (
        "worker 1 (host b, pid 4001) lost: killed by signal 9; worker 0 of its unit is retired with"
        " it; continuing with 2 workers"
    )
    log.resumed(Resumed(2, 14, 2, (0,), 0.1, True))  # by the first of another unit
    assert log.membership is not None
    stay = [one for one in log.membership.members if one.rank > 1]
    log.take(log.membership.next([*stay, _member(6, 0), _member(7, 1)]))
    assert _text(log.joined(6, 12.0)).endswith("joined, 2.0 s after the loss")
    assert _text(log.joined(7, 12.0)).endswith("joined, 2.0 s after the loss")
    first, whole = log.summary()
    assert first == "paceline: 1 loss (worker 1), 1 replaced"
    assert "step 14 exchanged again with 2 workers" in whole
    assert whole.endswith("replacement (pid 4007) joined (2.0 s)")
