"""The roster as a story: servers, their copies, and where partitions live."""

from __future__ import annotations

import pytest
from roster_story import Story

from paceline.control.messages import Over, Unwanted, Wanted
from paceline.errors import UsageError


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


def test_copies_are_refilled_before_anything_moves_for_balance():
    story = Story(1, 3, replicas=3, num_partitions=6)
    story.lose(1)
    story.lose(2)
    before = story.now.partitions
    assert before == ((3,),) * 6
    first = story.come("server", 0)
    story.adopt(first)
    assert story.now.filling == ((first,),) * 6 and story.now.partitions == before
    story.sync()
    # One copy is missing still, and its server is awaited: the primaries stay where they are.
    assert story.now.partitions == ((3, first),) * 6
    second = story.come("server", 1)
    story.adopt(second)
    assert story.now.filling == ((second,),) * 6
    story.sync()
    assert {len(holders) for holders in story.now.partitions} == {3}
    assert sorted(holders[0] for holders in story.now.partitions) == [
        3,
        3,
        first,
        first,
        second,
        second,
    ]


def test_both_copies_lost_end_the_job_and_name_the_partition():
    story = Story(1, 3, replicas=2)
    story.lose(1)
    story.lose(2)
    (end,) = story.of(Over)
    assert "every copy of partition 0 of the servers' tables is lost" in end.why
    assert "server 1 (h:1002) lost: killed by signal 9" in end.why


@pytest.mark.parametrize("remain", [0, 1])
def test_tables_are_missed_only_while_a_worker_remains(remain):
    story = Story(2, 1, replicas=1)
    for rank in (0, 1)[remain:]:
        story(story.roster.left(rank, story.now_s, is_finished=True))
    story.lose(2)
    assert len(story.of(Over)) == remain


def test_a_filling_copy_does_not_count_as_a_copy():
    story = Story(1, 2, replicas=2)
    story.lose(1)
    newcomer = story.come("server")
    story.adopt()
    assert story.now.filling == ((newcomer,), (newcomer,))
    story.lose(2)
    assert "partitions 0, 1" in story.of(Over)[0].why


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
