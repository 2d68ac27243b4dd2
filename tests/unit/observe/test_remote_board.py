"""A job as an onlooker hears of it."""

from __future__ import annotations

from paceline.control import messages as m
from paceline.control.member import Member, Membership
from paceline.control.membership.policy import Policy
from paceline.control.operator_messages import Happened, Status
from paceline.observe.display.remote_board import RemoteBoard
from paceline.observe.telemetry.events import ProgressReport


def _member(rank: int, role: str = "worker", number: int | None = None) -> Member:
    number = rank if number is None else number
    return Member(rank, role, "host", "here", 100 + rank, rank, "", "", number)


def _watched() -> RemoteBoard:
    watched = RemoteBoard()
    members = (_member(0), _member(1), _member(2, "server", 0))
    watched.take(Status(1, Policy.fixed(3, 5.0), Membership(1, members)))
    return watched


def _rows(watched: RemoteBoard) -> list[tuple[str, int | None, str]]:
    return [(row.label, row.step, row.state) for row in watched.snapshot().rows]


def test_members_have_rows_before_they_report() -> None:
    watched = _watched()
    assert _rows(watched) == [("0", None, "running"), ("1", None, "running")]
    assert not watched.has_progress
    watched.on_notification(Happened(ProgressReport(1, 7)))
    assert _rows(watched)[1] == ("1", 7, "running") and watched.has_progress


def test_a_job_that_forms_is_seen_when_it_has() -> None:
    watched = RemoteBoard()
    watched.take(Status(1, Policy.fixed(2, 5.0), None))
    assert _rows(watched) == []
    watched.on_notification(m.Changed(Membership(1, (_member(0), _member(1)))))
    assert len(_rows(watched)) == 2


def test_who_is_lost_is_replaced_in_its_row() -> None:
    watched = _watched()
    watched.on_notification(Happened(ProgressReport(1, 7)))
    loss = m.Loss(1, 1, "worker", "here:101", "killed by SIGKILL")
    watched.on_notification(
        m.Changed(Membership(2, (_member(0), _member(2, "server", 0))), (loss,))
    )
    assert _rows(watched)[1] == ("1", 7, "lost")
    assert watched.describe_end() == "rank 1 was lost: killed by SIGKILL"
    replaced = (_member(0), _member(2, "server", 0), _member(5, number=1))
    watched.on_notification(m.Changed(Membership(3, replaced), joined=(5,)))
    assert _rows(watched)[1] == ("1", None, "running")


def test_the_end_is_told_as_far_as_it_is_known() -> None:
    watched = _watched()
    assert watched.describe_end() == "it was stopped"
    watched.on_notification(m.Presence(0, "left", "it exited cleanly"))
    assert watched.describe_end() == "rank 0 finished, rank 1 did not"
    watched.on_notification(m.Presence(1, "left", "it exited cleanly"))
    assert watched.describe_end() == "ranks 0-1 finished"
    watched.on_notification(m.Over("no worker is left"))
    assert watched.describe_end() == "no worker is left"


def test_strangers_are_ignored() -> None:
    watched = _watched()
    watched.on_notification(m.Presence(77, "lost", "never seen"))
    watched.on_notification(Happened(ProgressReport(77, 1)))
    assert len(_rows(watched)) == 2 and not watched.has_progress
