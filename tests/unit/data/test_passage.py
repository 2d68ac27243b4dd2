"""Lines and passages: a newcomer comes into what is open, and leaves out what is over."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.data.course import Course, Rules
from paceline.data.line import Line
from paceline.data.order import LocalOrder
from paceline.data.passage import Passage, Turn
from paceline.data.split import spread


def course(members: tuple[int, ...] = (0, 1)) -> Course:
    rules = Rules(lambda _: 4, spread, drop_short=False, again=list)
    return Course(rules, LocalOrder(40, None), members)


def begun(line: Line, **changes: Any) -> Passage:
    passage = Passage(line.my_passes, line.next_epoch, True, course(), **changes)
    line.begin(passage)
    return passage


def take(passage: Passage, count: int = 1) -> None:
    for _ in range(count):
        passage.course.take(passage.cursor)  # type: ignore[attr-defined]
        passage.cursor += 1


def told(line: Line, *, is_replay: bool, into: Line | None = None) -> Line:
    other = into or Line()
    other.load(msgspec.msgpack.decode(msgspec.msgpack.encode(line.pack())), is_replay=is_replay)
    return other


def test_a_newcomer_leaves_out_what_is_over_and_goes_on_where_the_others_are() -> None:
    line = Line()
    for _ in range(2):
        passage = begun(line)
        take(passage, 10)
        line.commit()
        line.end(passage)
    passage = begun(line)
    take(passage, 3)
    line.commit()
    newcomer = told(line, is_replay=True)
    turn = Turn((0, 1, 7), uncounted=False, replaced={})
    for one in (line, newcomer):
        one.turn(turn)
    for epoch in range(2):
        assert newcomer.is_pass_over and newcomer.next_epoch == epoch
        newcomer.skip_pass(epoch)
    assert newcomer.is_pass_known and not newcomer.is_pass_over
    mine = begun(newcomer)
    assert (mine.index, mine.epoch, mine.cursor) == (2, 2, 3)
    assert mine.course.pack() == passage.course.pack()
    assert not newcomer.is_pass_known  # the next one begins with everybody


def test_a_replacement_begins_with_the_step_that_is_under_way() -> None:
    line = Line()
    passage = begun(line)
    take(passage, 2)
    line.commit()
    take(passage, 2)
    newcomer = told(line, is_replay=True)
    newcomer.turn(Turn((0, 7), uncounted=False, replaced={1: 7}))
    mine = begun(newcomer)
    assert mine.cursor == 2
    assert mine.course.part(2, 7) == passage.course.part(2, 1)  # type: ignore[attr-defined]


def test_one_who_is_behind_keeps_its_own_place() -> None:
    ahead, behind = Line(), Line()
    first, mine = begun(ahead), begun(behind)
    take(first, 4)
    take(mine, 3)
    ahead.commit()
    told(ahead, is_replay=False, into=behind)
    for line in (ahead, behind):
        line.turn(Turn((0,), uncounted=True, replaced={}))
    assert mine.cursor == 3 and mine.course.pack() == first.course.pack()


def test_nothing_changes_in_a_pass_that_the_others_have_left() -> None:
    ahead, behind = Line(), Line()
    first, mine = begun(ahead), begun(behind)
    for passage in (first, mine):
        take(passage, 10)
    ahead.commit()
    ahead.end(first)
    second = begun(ahead)
    take(second)
    told(ahead, is_replay=False, into=behind)
    for line in (ahead, behind):
        line.turn(Turn((0,), uncounted=True, replaced={}))
    assert mine.course.part(10, 0) is None  # type: ignore[attr-defined]
    behind.commit()
    behind.end(mine)
    following = begun(behind)
    assert following.cursor == 0 and following.course.pack() == second.course.pack()
    assert following.course.part(0, 0) == (range(0, 2), 1.0)  # type: ignore[attr-defined]
    assert following.course.part(10, 0) == ([2, 3], 1.0)  # type: ignore[attr-defined]


def test_an_evaluation_is_queued_again_as_a_whole() -> None:
    line = Line()
    passage = begun(line)
    passage.counts = False
    take(passage, 10)
    line.commit()  # counts for nothing here
    line.turn(Turn((0,), uncounted=False, replaced={}))
    queue = passage.course.queue  # type: ignore[attr-defined]
    assert len(queue) == 20 and queue[:2] == [2, 3]
