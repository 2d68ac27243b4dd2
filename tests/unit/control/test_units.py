"""Units of a mesh in the roster: lost as a whole, replaced as a whole, in one change each."""

from __future__ import annotations

import pytest

from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.membership.roster import Roster
from paceline.control.messages import Changed, LossKind, Over, Presence, Wanted
from paceline.errors import RendezvousError, UsageError


def member(rank: int, number: int) -> Member:
    return Member(rank, "worker", "h", "h", 1000 + rank, number, "", "", number)


class Story:
    """A roster of units; everybody behaves."""

    def __init__(self, workers: int = 4, mesh: str = "dp=2,tp=2", **policy) -> None:
        policy.setdefault("min_workers", 2)
        self.policy = Policy(num_workers=workers, is_elastic=True, mesh=mesh, **policy)
        self.roster = Roster(self.policy)
        self.now_s = 100.0
        self.decisions: list = []
        for rank in range(workers):
            self.note(self.roster.join(member(rank, rank), self.now_s))

    def note(self, decisions) -> None:
        self.decisions = list(decisions)

    def of(self, kind) -> list:
        return [d for d in self.decisions if isinstance(d, kind)]

    @property
    def changes(self) -> list:
        return self.of(Changed)

    @property
    def now(self):
        return self.roster.membership

    def lose(self, rank: int, why: str = "killed by signal 9") -> None:
        self.note(self.roster.lost(rank, why, self.now_s, LossKind.KILLED))

    def adopt(self) -> None:
        told = []
        for rank in self.now.ranks:
            told += self.roster.entered(rank, self.now.generation, self.now_s)
        self.note(told)

    def reserve(self, number: int | None = None) -> tuple[int, int]:
        place, decisions = self.roster.reserve("worker", self.now_s, number)
        self.note(decisions)
        return place.rank, place.number

    def ready(self, rank: int, number: int) -> None:
        self.note(self.roster.ready(member(rank, number), self.now_s))

    def restart(self) -> None:
        """A coordinator that goes on from the journal; all members attach again."""
        self.roster = Roster(self.policy, self.roster.state, self.now_s)
        gone = {loss.rank for loss in self.roster.state.vacant}
        for rank in self.now.ranks:
            if rank not in gone:
                self.roster.attached(rank, self.now.generation, self.now_s)


def test_a_loss_takes_its_unit_in_one_change():
    story = Story()
    story.lose(2)
    (changed,) = story.changes
    assert story.now.workers == (0, 1)
    assert [(loss.rank, loss.kind, loss.why) for loss in changed.lost] == [
        (2, LossKind.KILLED, "killed by signal 9"),
        (3, LossKind.RETIRED, "retired with its unit: worker 2 (h:1002): killed by signal 9"),
    ]
    assert changed.why == "worker 2 (h:1002) lost: killed by signal 9, and 1 worker with its unit"
    assert [told.rank for told in story.of(Presence)] == [2, 3]
    assert story.of(Wanted) == [Wanted("worker", 2), Wanted("worker", 3)]
    story.lose(3, "its connection ended")  # which everybody knows
    assert story.decisions == []


def test_a_unit_comes_in_when_all_of_it_is_ready():
    story = Story()
    story.lose(1)
    story.adopt()
    first, second = story.reserve(0), story.reserve(1)
    assert (first, second) == ((4, 0), (5, 1))
    story.ready(*second)
    assert not story.changes and story.now.workers == (2, 3)
    story.ready(*first)
    (changed,) = story.changes
    assert changed.joined == (5, 4) and story.now.workers == (4, 5, 2, 3)
    assert story.now.generation == 3


def test_places_of_a_unit_have_ranks_in_a_row():
    story = Story(max_workers=8)
    story.lose(0)
    story.adopt()
    second = story.reserve(1)
    assert second == (5, 1)
    assert story.roster.wanted == (Wanted("worker", 0),)  # the launcher is to start that one too
    assert story.reserve(0) == (4, 0) and story.roster.wanted == ()
    with pytest.raises(RendezvousError, match="worker 0 is a member already, or is joining"):
        story.reserve(0)
    # By hand, one after the other: a unit beyond those that are wanted, until --max.
    assert [story.reserve() for _ in range(4)] == [(6, 4), (7, 5), (8, 6), (9, 7)]
    with pytest.raises(RendezvousError, match="the most that it may have"):
        story.reserve()


def test_a_newcomer_that_dies_takes_those_who_wait_with_it():
    story = Story()
    story.lose(3)
    story.adopt()
    first, second = story.reserve(2), story.reserve(3)
    story.ready(*first)
    story.lose(second[0], "exit code 1")
    (told,) = story.of(Presence)
    assert (told.rank, told.state) == (first[0], "lost")
    assert told.detail == "retired with its unit: worker 3: exit code 1"
    assert not story.changes
    assert story.of(Wanted) == [Wanted("worker", 2), Wanted("worker", 3)]
    with pytest.raises(RendezvousError, match="no such reservation"):
        story.ready(*first)
    again = [story.reserve(2), story.reserve(3)]
    assert again == [(6, 2), (7, 3)]
    for place in again:
        story.ready(*place)
    assert story.now.workers == (0, 1, 6, 7)


def test_a_place_that_nobody_takes_is_free_again_with_its_unit():
    story = Story(reserve_s=5.0)
    story.lose(3)
    story.adopt()
    first = story.reserve(2)
    story.ready(*first)
    told = []
    for _ in range(30):
        story.now_s += 0.25
        for rank in (*story.now.ranks, first[0]):
            story.roster.heard(rank, story.now_s)
        told += story.roster.tick(story.now_s)
    assert [one.rank for one in told if isinstance(one, Presence)] == [first[0]]
    assert story.roster.state.reserved == ()


def test_two_units_that_lose_one_each_at_the_same_time():
    story = Story(6, "dp=3,tp=2")
    story.lose(0)
    story.lose(5)
    assert story.now.workers == (2, 3) and story.now.generation == 3
    story.adopt()
    places = [story.reserve(number) for number in (0, 5, 4, 1)]
    for place in places:
        story.ready(*place)
        story.adopt()
        assert len(story.now.workers) % 2 == 0
    assert story.now.worker_numbers == (0, 1, 2, 3, 4, 5)


def test_a_loss_while_a_unit_is_let_in():
    story = Story(6, "dp=3,tp=2")
    story.lose(1)
    story.adopt()
    for place in (story.reserve(0), story.reserve(1)):
        story.ready(*place)
    assert story.now.workers == (6, 7, 2, 3, 4, 5)
    story.lose(7)  # it has not even entered the change
    assert story.now.workers == (2, 3, 4, 5)
    story.lose(2)
    assert story.now.workers == (4, 5)
    assert set(story.roster.wanted) == {Wanted("worker", n) for n in (0, 1, 2, 3)}


def test_a_restarted_coordinator_goes_on_with_half_a_unit_ready():
    story = Story()
    story.lose(1)
    story.adopt()
    first, second = story.reserve(0), story.reserve(1)
    story.ready(*first)
    story.restart()
    story.ready(*second)
    assert story.now.workers == (2, 3), "who was ready has to say so again"
    story.ready(*first)
    assert story.now.workers == (4, 5, 2, 3)


def test_a_restart_between_the_reservations_of_a_unit():
    story = Story()
    story.lose(1)
    story.adopt()
    assert story.reserve(0) == (4, 0)
    story.restart()
    assert story.reserve(1) == (5, 1)


def test_with_replace_the_whole_unit_is_waited_for():
    story = Story(on_loss="replace")
    story.lose(2)
    assert not story.changes and story.now.workers == (0, 1, 2, 3)
    assert [loss.rank for loss in story.roster.state.vacant] == [2, 3]
    story.restart()
    places = [story.reserve(3), story.reserve(2)]
    story.ready(*places[0])
    assert not story.changes
    story.ready(*places[1])
    (changed,) = story.changes
    assert story.now.workers == (0, 1, 4, 5) and len(changed.lost) == len(changed.joined) == 2


def test_with_replace_one_that_left_early_is_replaced_with_its_unit():
    story = Story(on_loss="replace")
    story.note(story.roster.left(2, story.now_s, is_finished=False))
    assert [told.state for told in story.of(Presence)] == ["left", "left"]
    assert kinds(story.roster.state.vacant) == [(2, LossKind.LEFT), (3, LossKind.RELEASED)]
    for number in (2, 3):
        story.ready(*story.reserve(number))
    assert story.now.workers == (0, 1, 4, 5)


def kinds(losses) -> list[tuple[int, LossKind]]:
    return [(loss.rank, loss.kind) for loss in losses]


def test_one_that_notices_the_loss_of_a_mate_first_is_lost_with_it():
    story = Story(on_loss="replace")
    story.note(story.roster.left(2, story.now_s, is_finished=False, has_lost_peer=True))
    assert not story.decisions, "who was lost is not known yet"
    story.lose(3)
    assert kinds(story.roster.state.vacant) == [(3, LossKind.KILLED), (2, LossKind.RETIRED)]
    story.now_s += 5.0
    story.note(story.roster.tick(story.now_s))
    assert not story.decisions, "it is lost once"
    for number in (2, 3):
        story.ready(*story.reserve(number))
    assert story.now.workers == (0, 1, 4, 5)


def test_one_that_has_lost_a_mate_whom_nobody_misses_is_lost_with_its_unit():
    story = Story()
    story.note(story.roster.left(2, story.now_s, is_finished=False, has_lost_peer=True))
    for _ in range(6):
        story.now_s += 0.2
        for rank in (0, 1, 3):
            story.roster.heard(rank, story.now_s)
        story.note(story.roster.tick(story.now_s))
        if story.decisions:
            break
    (changed,) = story.changes
    assert kinds(changed.lost) == [(2, LossKind.LOST_PEER), (3, LossKind.RETIRED)]
    assert [told.state for told in story.of(Presence)] == ["lost", "lost"]


def test_scripts_that_fail_do_not_end_the_job_by_their_number():
    story = Story(2, "tp=2")
    story.note(story.roster.left(0, story.now_s, is_finished=False))
    (changed,) = story.changes  # the launcher sees exit codes, and says what is wrong
    assert [loss.rank for loss in changed.lost] == [0, 1] and not story.of(Over)


def test_who_finishes_leaves_its_unit_alone():
    story = Story()
    story.note(story.roster.left(0, story.now_s))
    story.lose(2)
    assert story.now.workers == (1, 3)
    assert not story.of(Wanted)


@pytest.mark.parametrize("on_loss", ["shrink", "replace"])
def test_the_last_unit_is_the_end(on_loss: str):
    story = Story(2, "tp=2", on_loss=on_loss)
    story.lose(1)
    (end,) = story.of(Over)
    assert "0 workers are left, expected at least" in end.why
    assert "worker 1 (h:1001) lost: killed by signal 9, and 1 worker with its unit" in end.why
    assert "a mesh with dp of at least 2, or with --restarts 1 and a checkpoint" in end.why


def test_counts_are_multiples_of_the_units_size():
    story = Story(max_workers=8)
    with pytest.raises(UsageError, match=r"-n 5: .* units of tp 2 = 2, and 5 = 2 x 2 \+ 1; give"):
        story.roster.scale(5, story.now_s)
    story.note(story.roster.scale(6, story.now_s))
    assert story.of(Wanted) == [Wanted("worker", 4), Wanted("worker", 5)]
    story.roster.scale(2, story.now_s)
    story.adopt()
    assert story.now.workers == (0, 1)
    with pytest.raises(UsageError, match="--min 3: with mesh dp=2,tp=2 workers join and leave in"):
        Story(min_workers=3)
    with pytest.raises(UsageError, match="--max 9: .* such as --max 10"):
        Story(max_workers=9)
