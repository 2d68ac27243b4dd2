"""The roster as a story: members that are silent, cut off or unreachable, and restarts."""

from __future__ import annotations

import pytest
from roster_story import Story, member

from paceline.control.membership.roster import Roster
from paceline.control.messages import Changed, LossKind, Presence, Wanted
from paceline.errors import Evicted


def test_a_silent_member_is_told_then_lost_when_its_lease_ends():
    story = Story(3)
    story.wait(3.0, beats=[0, 2])
    assert [t.state for t in story.of(Presence)] == ["silent"]
    assert story.now.generation == 1, "three seconds are a straggler, no loss"
    story.wait(1.25, beats=[0, 2])
    assert story.now.workers == (0, 2)
    assert "no heartbeat for 4.0 s" in story.changed.lost[0].why


def test_a_silent_member_that_is_back_is_told_so():
    story = Story(3)
    story.wait(3.0, beats=[0, 2])
    story.wait(5.0)
    assert [t.state for t in story.of(Presence)] == ["back"]
    assert story.now.generation == 1


def test_the_launchers_word_outweighs_silence():
    story = Story(3)

    def wait(seconds):
        found = []
        for _ in range(int(seconds * 4)):
            story.roster.launcher_heard(story.now_s)
            found += story.wait(0.25, beats=[0, 2])
        return story(found)

    for rank in range(3):
        story.roster.seen(rank, story.now_s)
    wait(20)
    assert [t.detail for t in story.of(Presence)] == ["no heartbeat for 2.2 s: its process runs"]
    assert story.now.generation == 1, "starved, not lost"
    wait(11)
    assert "its process runs, but is stuck" in story.changed.lost[0].why
    assert story.changed.lost[0].kind is LossKind.SILENT


def test_a_stopped_process_is_lost_after_its_lease_and_not_before():
    story = Story(3)
    story.roster.launcher_heard(story.now_s)
    story.roster.seen(1, story.now_s, stopped_since_s=0.1)
    for _ in range(15):
        story.roster.launcher_heard(story.now_s)
        story.wait(0.25, beats=[0, 2])
    assert story.now.generation == 1
    story.roster.launcher_heard(story.now_s)
    story.wait(0.25, beats=[0, 2])
    assert "its process has been stopped for 4." in story.changed.lost[0].why


def test_a_launcher_that_is_gone_has_no_word():
    story = Story(3)
    story.roster.launcher_heard(story.now_s)
    for rank in range(3):
        story.roster.seen(rank, story.now_s)
    story.roster.launcher_heard(None)
    story.wait(4.5, beats=[0, 2])
    assert story.now.workers == (0, 2)


def test_nobody_is_blamed_for_the_coordinators_own_absence():
    story = Story(3)
    story.now_s += 60
    assert story.roster.tick(story.now_s) == []
    story.wait(3, beats=[])
    assert story.now.generation == 1


def test_one_of_two_that_cannot_reach_each_other_has_to_go():
    story = Story(2, 2, replicas=2)
    story.roster.reported_unreachable(2, 3, "connection reset", story.now_s)
    story.roster.reported_unreachable(3, 2, "connection reset", story.now_s)
    story.roster.reported_unreachable(0, 3, "no route", story.now_s)
    story.wait(0.25)
    assert story.now.generation == 1
    story.wait(0.5)
    assert [loss.rank for loss in story.changed.lost] == [3]
    assert "ranks 0, 2 cannot reach it: no route" in story.changed.lost[0].why
    story.adopt()
    story.wait(5)
    assert story.now.servers == (2,)


def test_a_worker_goes_rather_than_the_last_copy():
    story = Story(2, 1)
    story.roster.reported_unreachable(1, 2, "no route", story.now_s)
    story.wait(2)
    assert story.now.ranks == (0, 2)
    assert story.changed.lost[0].why == "it cannot reach rank 2"
    assert story.changed.lost[0].kind is LossKind.UNREACHABLE


def test_a_worker_that_is_cut_off_takes_no_server_with_it():
    story = Story(3, 3, replicas=2)
    for server in (3, 4):
        story.roster.reported_unreachable(1, server, "no route", story.now_s)
    story.wait(2)
    assert story.now.ranks == (0, 2, 3, 4, 5)
    assert story.changed.lost[0].why == "it cannot reach ranks 3, 4"


def test_a_server_that_nobody_reaches_has_to_go():
    story = Story(3, 3, replicas=2)
    story.roster.reported_unreachable(1, 4, "no route", story.now_s)
    story.wait(0.25)
    story.roster.reported_unreachable(2, 4, "no route", story.now_s)
    story.wait(1)
    assert story.now.ranks == (0, 1, 2, 3, 5)


def test_an_accusation_can_be_taken_back():
    story = Story(3)
    story.roster.reported_unreachable(0, 1, "slow", story.now_s)
    story.wait(0.25)
    story.roster.reported_unreachable(0, 1, "", story.now_s)
    story.wait(5)
    assert story.now.generation == 1


def test_a_restored_roster_goes_on_where_the_other_ended():
    story = Story(3, 2, replicas=2, max_workers=5)
    story.lose(1)
    story.lose(3)
    place, _ = story.roster.reserve("worker", story.now_s)
    before = story.roster.state
    story.roster = Roster(story.policy, before, story.now_s)
    assert story.roster.state == before
    story(story.roster.ready(member(place.rank, "worker", place.number), story.now_s))
    assert story.of(Changed) == []
    for rank in story.now.ranks:
        story(story.roster.attached(rank, story.now.generation, story.now_s))
    assert story.changed.joined == (place.rank,)
    with pytest.raises(Evicted, match="rank 1 is not in generation"):
        story.roster.attached(1, 1, story.now_s)


def test_a_newcomer_that_was_let_in_unheard_asks_again():
    story = Story(2, max_workers=3)
    rank = story.come()
    assert rank in story.now.ranks
    story.roster = Roster(story.policy, story.roster.state, story.now_s)
    assert story.roster.ready(member(rank), story.now_s) == []
    assert rank in story.now.ranks
    assert story.roster.late


def test_who_does_not_come_back_after_a_restart_is_lost():
    story = Story(3)
    story.roster = Roster(story.policy, story.roster.state, story.now_s)
    for rank in (0, 2):
        story.roster.attached(rank, 1, story.now_s)
    story.wait(9, beats=[0, 2])
    assert story.now.generation == 1
    story.wait(1.25, beats=[0, 2])
    assert story.now.workers == (0, 2)


def test_a_restored_roster_wants_what_is_missing():
    story = Story(3)
    story.lose(1)
    roster = Roster(story.policy, story.roster.state, story.now_s)
    assert Wanted("worker", 1) in roster.tick(story.now_s)
    assert roster.wanted == (Wanted("worker", 1),)
