"""Planned leaves: members of a host that goes away leave at a boundary, and nobody is lost."""

from __future__ import annotations

from roster_story import Story

from paceline.control.messages import Presence, Unwanted, Wanted


def settle(story: Story) -> None:
    """Let all members work in the newest generation, and copies that are filled catch up."""
    for _ in range(10):
        story.adopt()
        for partition, ranks in enumerate(story.now.filling):
            for rank in ranks:
                story(story.roster.in_sync(rank, partition, story.now.generation, story.now_s))


def test_a_worker_leaves_when_its_replacement_is_ready() -> None:
    story = Story(3)
    story(story.roster.plan_leave([2], story.now_s, waits=True, why="spot"))
    assert story.of(Wanted) == [Wanted("worker", 2)], "its replacement starts at once"
    assert [(p.rank, p.state) for p in story.of(Presence)] == [(2, "leaving")]
    assert story.now.workers == (0, 1, 2)
    newcomer = story.come(number=2)
    assert story.of(Unwanted) == [Unwanted(2)]
    assert (story.changed.lost, story.now.workers) == ((), (0, 1)), "not both in one change"
    story.adopt()
    assert story.now.workers == (0, 1), "the other one may still take its last step"
    assert story.roster.is_retiring(2)
    story(story.roster.left(2, story.now_s, is_finished=False))
    assert story.now.workers == (0, 1, newcomer)
    assert not story.roster.state.leaving and not story.roster.state.is_finishing


def test_without_room_a_worker_leaves_at_once_and_one_always_stays() -> None:
    story = Story(2)
    story(story.roster.plan_leave([0, 1], story.now_s, waits=False))
    assert story.now.workers == (0,), "a newcomer receives the training state from it"
    story.adopt()
    assert story.now.workers == (0,)
    story(story.roster.lost(1, "its connection ended", story.now_s))
    assert [(p.rank, p.state) for p in story.of(Presence)] == [(1, "left")]
    newcomer = story.come(number=1)
    story.adopt()
    assert story.now.workers == (newcomer,), "now the last one can leave"


def test_partitions_of_a_server_move_before_it_leaves() -> None:
    story = Story(1, servers=2, replicas=1, num_partitions=2)
    story(story.roster.plan_leave([2], story.now_s, waits=True))
    assert story.of(Wanted) == [Wanted("server", 2)], "its replacement has another number"
    settle(story)
    assert story.now.partitions == ((1,), (2,)), "they move once: to the replacement"
    newcomer = story.come("server", 2)
    settle(story)
    assert story.now.servers == (1, newcomer)
    assert story.now.partitions == ((1,), (newcomer,))
    assert not story.roster.state.leaving


def test_partitions_move_to_other_servers_if_no_replacement_comes_in_time() -> None:
    story = Story(1, servers=2, replicas=1, num_partitions=2)
    story(story.roster.plan_leave([2], story.now_s, waits=True))
    story(story.roster.plan_leave([2], story.now_s, waits=False))
    settle(story)
    assert story.now.servers == (1,)
    assert story.now.partitions == ((1,), (1,))


def test_copies_are_given_up_only_if_there_is_no_time() -> None:
    story = Story(1, servers=2, replicas=2, num_partitions=1)
    story(story.roster.plan_leave([1], story.now_s, waits=True))
    story.adopt()
    assert len(story.now.partitions[0]) == 2, "it waits for a third server"
    story(story.roster.plan_leave([1], story.now_s, waits=False))
    story.adopt()
    assert story.now.partitions == ((2,),) and story.now.servers == (2,)


def test_a_leave_can_be_withdrawn() -> None:
    story = Story(2, servers=2, replicas=2, num_partitions=1)
    story(story.roster.plan_leave([1, 3], story.now_s, waits=True))
    story(story.roster.withdraw_leave([1, 3], story.now_s))
    assert sorted((p.rank, p.state) for p in story.of(Presence)) == [(1, "back"), (3, "back")]
    story.adopt()
    assert story.now.workers == (0, 1) and story.now.servers == (2, 3)
    assert story.roster.wanted == () and story.roster.state.servers == (0, 1)
