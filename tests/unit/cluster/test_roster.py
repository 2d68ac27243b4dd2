"""The roster as a story: who comes, who goes, what is decided. No sockets, no clock."""

from __future__ import annotations

import pytest

from paceline.cluster import messages as m
from paceline.cluster.decisions import Announce, End, Remark, Tell, Unwanted, Wanted
from paceline.cluster.member import Member
from paceline.cluster.policy import Policy
from paceline.cluster.roster import Roster
from paceline.errors import ConfigError, Evicted, RendezvousError, UsageError


def member(rank, role="worker", number=None, host="h"):
    number = rank if number is None else number
    return Member(rank, role, host, host, 1000 + rank, number, "", "", number)


class Story:
    """A roster in which everybody behaves; time moves only when told."""

    def __init__(self, workers=3, servers=0, **policy):
        self.policy = Policy(num_workers=workers, num_servers=servers, is_elastic=True, **policy)
        self.roster = Roster(self.policy)
        self.now_s = 100.0
        self.decisions = []
        for rank in range(workers):
            self(self.roster.join(member(rank), self.now_s))
        for number in range(servers):
            self(self.roster.join(member(workers + number, "server", number), self.now_s))

    def __call__(self, decisions):
        """Note decisions, and return those of a kind."""
        self.decisions = list(decisions)
        return self.decisions

    def of(self, kind):
        return [d for d in self.decisions if isinstance(d, kind)]

    @property
    def changed(self):
        (announce,) = self.of(Announce)
        return announce.changed

    @property
    def now(self):
        return self.roster.membership

    def adopt(self, *skip):
        """Everybody works in the newest generation, and in those that follow from it."""
        all_told = []
        while True:
            generation = self.now.generation
            for rank in self.now.ranks:
                if rank not in skip and rank not in self.now.vacant:
                    all_told += self.roster.adopted(rank, generation, self.now_s)
            if self.now.generation == generation:
                self(all_told)
                return

    def lose(self, rank, why="killed by signal 9"):
        return self(self.roster.lost(rank, why, self.now_s))

    def come(self, role="worker", number=None):
        """Reserve a place and be ready; return the rank."""
        place, decisions = self.roster.reserve(role, self.now_s, number)
        newcomer = member(place.rank, role, place.number)
        self([*decisions, *self.roster.ready(newcomer, self.now_s)])
        return place.rank

    def wait(self, seconds, step_s=0.25, beats=None):
        """Let time pass; all members (or `beats`) send heartbeats."""
        found = []
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += step_s
            for rank in self.now.ranks if beats is None else beats:
                found += self.roster.heard(rank, self.now_s)
            found += self.roster.tick(self.now_s)
        return self(found)

    def sync(self):
        """Let every filling copy have everything, until all is quiet."""
        for _ in range(100):
            self.adopt()
            jobs = [(r, p) for p, ranks in enumerate(self.now.filling) for r in ranks]
            if not jobs:
                return
            for rank, partition in jobs:
                self.roster.in_sync(rank, partition, self.now.generation, self.now_s)
        raise AssertionError("it does not end")


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
    assert told == Tell(m.Presence(1, "lost", "h:1001: killed by signal 9"))
    assert announce.changed.membership.workers == (0, 2)
    assert announce.changed.lost == (m.Loss(1, 1, "worker", "h:1001", "killed by signal 9"),)
    assert wanted == Wanted("worker", 1)
    assert announce.changed.why == "worker 1 (h:1001) lost: killed by signal 9"


def test_a_loss_is_decided_once_whoever_tells_it():
    story = Story(3)
    story.lose(1)
    assert story.lose(1, "launcher says so too") == []


def test_a_newcomer_waits_until_all_have_adopted_and_takes_the_number():
    story = Story(3)
    story.lose(1)
    rank = story.come()
    assert rank == 3
    assert story.of(Announce) == []
    assert story(story.roster.adopted(0, 2, story.now_s)) == []
    story(story.roster.adopted(2, 2, story.now_s))
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
    with pytest.raises(RendezvousError, match="no such place"):
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
    with pytest.raises(RendezvousError, match="worker 1 is there already"):
        story.roster.reserve("worker", 0.0, 1)


def test_too_few_workers_end_the_job():
    story = Story(3, min_workers=2)
    story.lose(1)
    assert story.of(End) == []
    story.lose(0)
    (end,) = story.of(End)
    assert "1 worker is left, expected at least 2 (--min): worker 0 (h:1000) lost" in end.why
    assert story.roster.state.over == end.why
    assert story.lose(2)[1:] == []
    with pytest.raises(RendezvousError, match="the job is over"):
        story.come()


def test_replace_holds_the_place_open_until_somebody_takes_it():
    story = Story(3, on_loss="replace")
    story.lose(1)
    assert story.of(Announce) == []
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
    story.lose(2)  # before anybody has adopted the generation with the replacement
    story.lose(3)
    assert story.of(Announce) == []
    first = story.come()
    assert story.of(Announce) == []
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
    assert story.of(End) == []
    story.lose(1)
    assert "0 workers are left, expected at least 1" in story.of(End)[0].why


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
    assert story.of(Announce) == [], "one calm change at a time"
    assert story(story.roster.left(2, story.now_s))
    assert not story.roster.state.is_finishing
    assert story.roster.left(3, story.now_s) == []
    story.adopt()
    assert story.of(Unwanted) == [Unwanted(1)]
    assert story.now.workers == (0,)
    assert story(story.roster.scale(2, story.now_s)) == [Wanted("worker", 1)]
    for wrong in (0, 5):
        with pytest.raises(UsageError, match="this job may have 1 to 4"):
            story.roster.scale(wrong, story.now_s)


def test_a_lost_server_promotes_its_backup_at_once():
    story = Story(2, 2, replicas=2)
    assert story.now.partitions == ((2, 3), (3, 2))
    story.lose(2)
    assert story.changed.membership.partitions == ((3,), (3,))
    assert story.now.primary_since(0) == 2
    assert story.of(Wanted) == [Wanted("server", 0)]
    newcomer = story.come("server")
    story.adopt(newcomer)
    assert story.now.filling == ((newcomer,), (newcomer,))
    story.sync()
    assert sorted(story.now.partitions) == [(3, newcomer), (newcomer, 3)]


def test_both_copies_lost_end_the_job_and_name_the_partition():
    story = Story(1, 3, replicas=2)
    story.lose(1)
    story.lose(2)
    (end,) = story.of(End)
    assert "every copy of partition 0 of the servers' tables is lost" in end.why
    assert "server 1 (h:1002) lost: killed by signal 9" in end.why


def test_a_filling_copy_does_not_count_as_a_copy():
    story = Story(1, 2, replicas=2)
    story.lose(1)
    newcomer = story.come("server")
    story.adopt()
    assert story.now.filling == ((newcomer,), (newcomer,))
    story.lose(2)
    assert "partitions 0, 1" in story.of(End)[0].why


def test_what_was_said_about_another_primary_does_not_count():
    story = Story(1, 3, replicas=2, num_partitions=1)
    assert story.now.partitions == ((1, 2),)
    story.lose(2)  # the backup: server 2 (rank 3) is filled
    assert story.now.filling == ((3,),)
    early = story.now.generation
    story.adopt()
    newcomer = story.come("server")
    story.adopt()
    story.roster.in_sync(newcomer, 0, story.now.generation, story.now_s)  # not asked for
    assert story.now.partitions == ((1,),)
    story.roster.in_sync(3, 0, early - 1, story.now_s)  # before it was asked for
    story.roster.in_sync(3, 0, story.now.generation, story.now_s)
    story.adopt()
    assert story.now.partitions == ((1, 3),)
    story.lose(1)
    assert story.now.partitions == ((3,),)
    stale = story.now.generation - 1
    story.adopt()
    (target,) = story.now.filling[0]
    story.roster.in_sync(target, 0, stale, story.now_s)
    story.adopt()
    assert story.now.partitions == ((3,),)


def test_added_servers_get_their_share_and_removed_ones_are_emptied_first():
    story = Story(1, 2, replicas=2, num_partitions=6, max_servers=4)
    story(story.roster.add_servers(1, story.now_s))
    assert story.of(Wanted) == [Wanted("server", 2)]
    newcomer = story.come("server")
    story.sync()
    layout = story.now
    loads = [sum(r in ranks for ranks in layout.partitions) for r in layout.servers]
    assert loads == [4, 4, 4]
    story(story.roster.remove_servers([0], story.now_s))
    assert story.of(Unwanted) == []
    story.sync()
    assert all(1 not in ranks for ranks in story.now.partitions)
    assert story.roster.left(1, story.now_s) == []
    assert story.now.servers == (2, newcomer)
    assert not story.roster.state.is_finishing
    with pytest.raises(UsageError, match=r"would leave 1: each partition needs 2"):
        story.roster.remove_servers([1], story.now_s)
    with pytest.raises(UsageError, match="there is no server 7; this job has 1, 2"):
        story.roster.remove_servers([7], story.now_s)
    with pytest.raises(UsageError, match="may have up to 4"):
        story.roster.add_servers(3, story.now_s)


def test_a_silent_member_is_told_then_lost_when_its_lease_ends():
    story = Story(3)
    story.wait(3.0, beats=[0, 2])
    assert [t.presence.state for t in story.of(Tell)] == ["silent"]
    assert story.now.generation == 1, "three seconds are a straggler, no loss"
    story.wait(1.25, beats=[0, 2])
    assert story.now.workers == (0, 2)
    assert "no heartbeat for 4.0 s" in story.changed.lost[0].why


def test_a_silent_member_that_is_back_is_told_so():
    story = Story(3)
    story.wait(3.0, beats=[0, 2])
    story.wait(5.0)
    assert [t.presence.state for t in story.of(Tell)] == ["back"]
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
    assert [t.presence.detail for t in story.of(Tell)] == [
        "no heartbeat for 2.2 s: its process runs"
    ]
    assert story.now.generation == 1, "starved, not lost"
    wait(11)
    assert "its process runs, but is stuck" in story.changed.lost[0].why


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
    assert "its process is stopped since 4." in story.changed.lost[0].why


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
    story.roster.accused(2, 3, "connection reset", story.now_s)
    story.roster.accused(3, 2, "connection reset", story.now_s)
    story.roster.accused(0, 3, "no route", story.now_s)
    story.wait(0.75)
    assert story.now.generation == 1
    story.wait(0.5)
    assert [loss.rank for loss in story.changed.lost] == [3]
    assert "ranks 0, 2 cannot reach it: no route" in story.changed.lost[0].why
    story.adopt()
    story.wait(5)
    assert story.now.servers == (2,)


def test_a_worker_goes_rather_than_the_last_copy():
    story = Story(2, 1)
    story.roster.accused(1, 2, "no route", story.now_s)
    story.wait(2)
    assert story.now.ranks == (0, 2)
    assert story.changed.lost[0].why == "it cannot reach rank 2"


def test_a_worker_that_is_cut_off_takes_no_server_with_it():
    story = Story(3, 3, replicas=2)
    for server in (3, 4):
        story.roster.accused(1, server, "no route", story.now_s)
    story.wait(2)
    assert story.now.ranks == (0, 2, 3, 4, 5)
    assert story.changed.lost[0].why == "it cannot reach ranks 3, 4"


def test_a_server_that_nobody_reaches_has_to_go():
    story = Story(3, 3, replicas=2)
    story.roster.accused(1, 4, "no route", story.now_s)
    story.wait(0.5)
    story.roster.accused(2, 4, "no route", story.now_s)
    story.wait(1)
    assert story.now.ranks == (0, 1, 2, 3, 5)


def test_an_accusation_can_be_taken_back():
    story = Story(3)
    story.roster.accused(0, 1, "slow", story.now_s)
    story.wait(0.5)
    story.roster.accused(0, 1, "", story.now_s)
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
    assert story.of(Announce) == []
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
    assert not story.roster.is_settled


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
    assert announce.changed.membership.partitions == ()
    before = roster.state
    assert roster.lost(1, "killed", 1.0) == [Tell(m.Presence(1, "lost", "h:1001: killed"))]
    assert roster.left(0, 1.0) == [Tell(m.Presence(0, "left", "it ended in good order"))]
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
