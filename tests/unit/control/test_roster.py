"""The roster as a story: who comes, who goes, what is decided. No sockets, no clock."""

from __future__ import annotations

import pytest
from roster_story import Story, member

from paceline.control import messages as m
from paceline.control.membership.policy import Policy
from paceline.control.membership.roster import Roster
from paceline.control.messages import Changed, Over, Remark, Unwanted, Wanted
from paceline.errors import ConfigError, RendezvousError, UsageError


def test_the_first_crowd_is_the_first_generation():
    story = Story(2, 1)
    assert story.changed.membership == story.now
    assert (story.now.generation, story.now.workers, story.now.servers) == (1, (0, 1), (2,))
    assert story.now.partitions == ((2,),)
    assert story.changed.joined == (0, 1, 2)


def test_a_lost_worker_goes_at_once_and_its_place_is_wanted():
    story = Story(3)
    story.lose(1)
    told, announce, wanted = story.decisions
    assert told == m.Presence(1, "lost", "killed by signal 9", "h:1001", m.LossKind.ENDED)
    assert announce.membership.workers == (0, 2)
    assert announce.lost == (m.Loss(1, 1, "worker", "h:1001", "killed by signal 9"),)
    assert wanted == Wanted("worker", 1)
    assert announce.why == "worker 1 (h:1001) lost: killed by signal 9"


def test_a_loss_is_decided_once_whoever_tells_it():
    story = Story(3)
    story.lose(1)
    assert story.lose(1, "launcher says so too") == []


def test_a_newcomer_waits_until_all_have_adopted_and_takes_the_number():
    story = Story(3)
    story.lose(1)
    rank = story.come()
    assert rank == 3
    assert story.of(Changed) == []
    assert story(story.roster.entered(0, 2, story.now_s)) == []
    story(story.roster.entered(2, 2, story.now_s))
    assert story.changed.joined == (3,)
    assert story.now.workers == (0, 3, 2)
    assert story.now.member(3).number == 1
    assert story.roster.state.reserved == ()


def test_a_loss_overtakes_a_newcomer():
    story = Story(3)
    story.lose(1)
    story.come()
    story.lose(2)
    assert story.now.ranks == (0,)
    assert story.changed.joined == ()
    story.adopt()
    assert story.now.ranks == (0, 3)


def test_a_newcomer_that_dies_frees_its_place():
    story = Story(2)
    story.lose(1)
    rank = story.come()
    assert story.roster.wanted == ()
    assert story.lose(rank) == [Wanted("worker", 1)]
    story.adopt()
    assert story.now.ranks == (0,)
    assert story.come() == rank + 1, "a rank is never given away twice"


def test_a_place_for_which_nobody_comes_is_wanted_again():
    story = Story(2, reserve_s=10.0)
    story.lose(1)
    place, _ = story.roster.reserve("worker", story.now_s)
    assert story.roster.wanted == ()
    story.wait(11)
    assert story.of(Wanted) == [Wanted("worker", 1)]
    with pytest.raises(RendezvousError, match="no such reservation"):
        story.roster.ready(member(place.rank, "worker", 1), story.now_s)


def test_a_slow_newcomer_that_is_heard_keeps_its_place():
    story = Story(2, reserve_s=10.0)
    story.lose(1)
    place, _ = story.roster.reserve("worker", story.now_s)
    story.wait(30, beats=[0, place.rank])
    assert story.roster.ready(member(place.rank, "worker", 1), story.now_s) == []


def test_numbers_are_given_away_once():
    story = Story(2, max_workers=4)
    places = [story.roster.reserve("worker", 0.0)[0] for _ in range(2)]
    assert [(p.rank, p.number) for p in places] == [(2, 2), (3, 3)]
    with pytest.raises(RendezvousError, match=r"has 4 workers, .* most .*--max 4"):
        story.roster.reserve("worker", 0.0)
    with pytest.raises(RendezvousError, match="worker 1 is a member already"):
        story.roster.reserve("worker", 0.0, 1)


def test_too_few_workers_end_the_job():
    story = Story(3, min_workers=2)
    story.lose(1)
    assert story.of(Over) == []
    story.lose(0)
    (end,) = story.of(Over)
    assert "1 worker is left, expected at least 2 (--min): worker 0 (h:1000) lost" in end.why
    assert story.roster.state.over == end.why
    assert story.lose(2)[1:] == []
    with pytest.raises(RendezvousError, match="the job is over"):
        story.come()


def test_replace_holds_the_place_open_until_somebody_takes_it():
    story = Story(3, on_loss="replace")
    story.lose(1)
    assert story.of(Changed) == []
    assert story.of(Wanted) == [Wanted("worker", 1)]
    assert [loss.rank for loss in story.roster.state.vacant] == [1]
    story.come()
    assert story.now.workers == (0, 3, 2)
    assert [loss.rank for loss in story.changed.lost] == [1]
    assert story.changed.joined == (3,)
    assert story.roster.state.vacant == ()


def test_replace_waits_for_all_and_for_nobodys_adoption():
    story = Story(3, on_loss="replace")
    story.lose(1)
    story.come()
    story.lose(2)  # before anybody has entered the generation with the replacement
    story.lose(3)
    assert story.of(Changed) == []
    first = story.come()
    assert story.of(Changed) == []
    second = story.come()
    assert story.now.ranks == (0, first, second)
    assert {loss.rank for loss in story.changed.lost} == {2, 3}


def test_replace_keeps_vacant_places_through_other_changes():
    story = Story(3, 2, on_loss="replace", replicas=2)
    story.lose(1)
    story.lose(3)
    assert story.changed.membership.vacant == (1,)
    assert story.now.workers == (0, 1, 2)
    assert story.now.partitions == ((4,), (4,))
    story.adopt()
    newcomer = story.come("server")
    assert story.now.servers == (newcomer, 4)
    assert story.now.vacant == (1,)
    story.come("worker")
    assert story.now.vacant == ()


def test_replace_without_anybody_left_is_over():
    story = Story(2, on_loss="replace")
    story.lose(0)
    assert story.of(Over) == []
    story.lose(1)
    assert "0 workers are left, expected at least 1" in story.of(Over)[0].why


def test_a_vacant_place_that_is_scaled_away_is_not_waited_for():
    story = Story(3, on_loss="replace")
    story.lose(2)
    story(story.roster.scale(2, story.now_s))
    assert story.now.workers == (0, 1)


def test_leaving_in_good_order_is_no_loss():
    story = Story(3, min_workers=3)
    story(story.roster.left(1, story.now_s))
    assert story.changed.lost == ()
    assert story.now.workers == (0, 2)
    assert story.of(Wanted) == []
    assert story.roster.state.is_finishing
    story.lose(0)
    assert story.now.workers == (2,), "at the end nobody is replaced, and no minimum counts"
    with pytest.raises(RendezvousError, match="finishing"):
        story.come()


def test_leaving_early_is_replaced():
    story = Story(3)
    story(story.roster.left(1, story.now_s, is_finished=False))
    assert story.of(Wanted) == [Wanted("worker", 1)]


def test_scaling_up_and_down():
    story = Story(2, max_workers=4)
    assert story(story.roster.scale(4, story.now_s)) == [Wanted("worker", 2), Wanted("worker", 3)]
    story.come()
    story.come()
    story.adopt()
    assert story.now.workers == (0, 1, 2, 3)
    story(story.roster.scale(3, story.now_s))
    assert story.of(Unwanted) == [Unwanted(3)]
    assert (story.changed.lost, story.now.workers) == ((), (0, 1, 2))
    story(story.roster.scale(1, story.now_s))
    assert story.of(Changed) == [], "one calm change at a time"
    assert story(story.roster.left(2, story.now_s))
    assert not story.roster.state.is_finishing
    (gone,) = story.roster.left(3, story.now_s)
    assert (gone.rank, gone.state) == (3, "left"), "servers need not wait for its last step"
    story.adopt()
    assert story.of(Unwanted) == [Unwanted(1)]
    assert story.now.workers == (0,)
    assert story(story.roster.scale(2, story.now_s)) == [Wanted("worker", 1)]
    for wrong in (0, 5):
        with pytest.raises(UsageError, match="this job may have 1 to 4"):
            story.roster.scale(wrong, story.now_s)


def test_who_a_newcomer_waits_for_is_told_once():
    story = Story(2, max_workers=3)
    story.lose(1)
    story.come()
    story.wait(4)
    (remark,) = story.of(Remark)
    assert remark.text == "worker 1 (h:1002) will join when worker 0 (h:1000) works in generation 2"


def test_a_job_that_is_not_elastic_never_changes():
    roster = Roster(Policy.fixed(2))
    roster.join(member(0), 0.0)
    (announce,) = roster.join(member(1), 0.0)
    assert announce.membership.partitions == ()
    before = roster.state
    lost = m.Presence(1, "lost", "killed", "h:1001", m.LossKind.KILLED)
    assert roster.lost(1, "killed", 1.0, m.LossKind.KILLED) == [lost]
    assert roster.left(0, 1.0) == [m.Presence(0, "left", "it exited cleanly")]
    assert roster.state == before
    for attempt in (lambda: roster.reserve("worker", 0.0), lambda: roster.scale(1, 0.0)):
        with pytest.raises(RendezvousError, match="not elastic"):
            attempt()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"min_workers": 3}, "at least --min 3"),
        ({"max_workers": 1}, "at most --max 1"),
        ({"on_loss": "shrug"}, "expected one of shrink, replace"),
        ({"replicas": 2}, "replicas 2 > servers 0"),
        ({"lease_s": 0.0}, "lease_s 0.0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        Policy(num_workers=2, is_elastic=True, **wrong)
