"""Lines: a newcomer comes into what is open, and leaves out what is over."""

from __future__ import annotations

import msgspec

from paceline.data.cursor.cursor import NEWCOMER, PEER, Arrival, Turn
from paceline.data.cursor.indices import IndexCursor, Rules
from paceline.data.cursor.loader_state import Line
from paceline.data.split.order import LocalOrder
from paceline.data.split.weights import spread


def begun(line: Line) -> IndexCursor:
    rules = Rules(lambda _: 4, spread, drop_short=False, again=list)
    cursor = IndexCursor(rules, LocalOrder(40, None), (0, 1))
    cursor.index, cursor.epoch = line.my_passes, line.next_epoch
    line.begin(cursor)
    return cursor


def take(cursor: IndexCursor, count: int = 1) -> None:
    for _ in range(count):
        cursor.take(cursor.position)
        cursor.position += 1


def told(line: Line, how: Arrival, into: Line | None = None) -> Line:
    other = into or Line()
    sent = msgspec.msgpack.encode([line.state(), line.live()])
    other.load(*msgspec.msgpack.decode(sent), how)
    return other


def test_a_newcomer_leaves_out_what_is_over_and_goes_on_where_the_others_are() -> None:
    line = Line()
    for _ in range(2):
        cursor = begun(line)
        take(cursor, 10)
        line.commit()
        line.end(cursor)
    cursor = begun(line)
    take(cursor, 3)
    line.commit()
    newcomer = told(line, NEWCOMER)
    turn = Turn((0, 1, 7), uncounted=False, replaced={})
    for one in (line, newcomer):
        one.turn(turn)
    for epoch in range(2):
        assert newcomer.is_over(is_lockstep=True) and newcomer.next_epoch == epoch
        newcomer.skip_pass(epoch)
    assert newcomer.is_pass_known and not newcomer.is_over(is_lockstep=True)
    mine = begun(newcomer)
    assert (mine.index, mine.epoch, mine.position) == (2, 2, 3)
    assert mine.live() == cursor.live()
    assert not newcomer.is_pass_known  # the next one begins with everybody


def test_a_replacement_begins_with_the_step_that_is_under_way() -> None:
    line = Line()
    cursor = begun(line)
    take(cursor, 2)
    line.commit()
    take(cursor, 2)
    newcomer = told(line, NEWCOMER)
    newcomer.turn(Turn((0, 7), uncounted=False, replaced={1: 7}))
    mine = begun(newcomer)
    assert mine.position == 2
    assert mine.part(2, 7) == cursor.part(2, 1)


def test_one_who_is_behind_keeps_its_own_place() -> None:
    ahead, behind = Line(), Line()
    first, mine = begun(ahead), begun(behind)
    take(first, 4)
    take(mine, 3)
    ahead.commit()
    told(ahead, PEER, into=behind)
    for line in (ahead, behind):
        line.turn(Turn((0,), uncounted=True, replaced={}))
    assert mine.position == 3 and mine.live() == first.live()


def test_nothing_changes_in_a_pass_that_the_others_have_left() -> None:
    ahead, behind = Line(), Line()
    first, mine = begun(ahead), begun(behind)
    for cursor in (first, mine):
        take(cursor, 10)
    ahead.commit()
    ahead.end(first)
    second = begun(ahead)
    take(second)
    told(ahead, PEER, into=behind)
    for line in (ahead, behind):
        line.turn(Turn((0,), uncounted=True, replaced={}))
    assert mine.part(10, 0) is None
    behind.commit()
    behind.end(mine)
    following = begun(behind)
    assert following.position == 0 and following.live() == second.live()
    assert following.part(0, 0) == (range(0, 2), 1.0)
    assert following.part(10, 0) == ([2, 3], 1.0)


def test_an_evaluation_is_queued_again_as_a_whole() -> None:
    line = Line()
    cursor = begun(line)
    cursor.counts = False
    take(cursor, 10)
    line.commit()  # counts for nothing here
    line.turn(Turn((0,), uncounted=False, replaced={}))
    queue = cursor.queue
    assert len(queue) == 20 and queue[:2] == [2, 3]
