"""LoaderState: a newcomer enters open passes, and skips passes that are over."""

from __future__ import annotations

import msgspec

from paceline.data.cursor.cursor import NEWCOMER, PEER, StateOrigin, WorkerChange
from paceline.data.cursor.indices import IndexCursor, Rules
from paceline.data.cursor.loader_state import LoaderState
from paceline.data.split.order import LocalOrder
from paceline.data.split.weights import spread


def begun(loader: LoaderState) -> IndexCursor:
    rules = Rules(lambda _: 4, spread, drop_short=False, again=list)
    cursor = IndexCursor(rules, LocalOrder(40, None), (0, 1))
    cursor.index, cursor.epoch = loader.my_passes, loader.next_epoch
    loader.begin(cursor)
    return cursor


def take(cursor: IndexCursor, count: int = 1) -> None:
    for _ in range(count):
        cursor.take(cursor.position)
        cursor.position += 1


def transfer(
    loader: LoaderState, origin: StateOrigin, into: LoaderState | None = None
) -> LoaderState:
    other = into or LoaderState()
    sent = msgspec.msgpack.encode([loader.state(), loader.live()])
    other.load(*msgspec.msgpack.decode(sent), origin)
    return other


def test_a_newcomer_skips_what_is_over_and_continues_where_the_other_workers_are() -> None:
    loader = LoaderState()
    for _ in range(2):
        cursor = begun(loader)
        take(cursor, 10)
        loader.commit()
        loader.end(cursor)
    cursor = begun(loader)
    take(cursor, 3)
    loader.commit()
    newcomer = transfer(loader, NEWCOMER)
    change = WorkerChange((0, 1, 7), requeues_lost=False, replaced={})
    for one in (loader, newcomer):
        one.on_worker_change(change)
    for epoch in range(2):
        assert newcomer.is_over(is_lockstep=True) and newcomer.next_epoch == epoch
        newcomer.skip_pass(epoch)
    assert newcomer.is_pass_known and not newcomer.is_over(is_lockstep=True)
    mine = begun(newcomer)
    assert (mine.index, mine.epoch, mine.position) == (2, 2, 3)
    assert mine.live() == cursor.live()
    assert not newcomer.is_pass_known  # all workers begin the next one


def test_a_replacement_starts_with_the_step_that_is_under_way() -> None:
    loader = LoaderState()
    cursor = begun(loader)
    take(cursor, 2)
    loader.commit()
    take(cursor, 2)
    newcomer = transfer(loader, NEWCOMER)
    newcomer.on_worker_change(WorkerChange((0, 7), requeues_lost=False, replaced={1: 7}))
    mine = begun(newcomer)
    assert mine.position == 2
    assert mine.part(2, 7) == cursor.part(2, 1)


def test_a_worker_that_lags_keeps_its_position() -> None:
    ahead, lagging = LoaderState(), LoaderState()
    first, mine = begun(ahead), begun(lagging)
    take(first, 4)
    take(mine, 3)
    ahead.commit()
    transfer(ahead, PEER, into=lagging)
    for loader in (ahead, lagging):
        loader.on_worker_change(WorkerChange((0,), requeues_lost=True, replaced={}))
    assert mine.position == 3 and mine.live() == first.live()


def test_nothing_changes_in_a_pass_that_other_workers_have_ended() -> None:
    ahead, lagging = LoaderState(), LoaderState()
    first, mine = begun(ahead), begun(lagging)
    for cursor in (first, mine):
        take(cursor, 10)
    ahead.commit()
    ahead.end(first)
    second = begun(ahead)
    take(second)
    transfer(ahead, PEER, into=lagging)
    for loader in (ahead, lagging):
        loader.on_worker_change(WorkerChange((0,), requeues_lost=True, replaced={}))
    assert mine.part(10, 0) is None
    lagging.commit()
    lagging.end(mine)
    following = begun(lagging)
    assert following.position == 0 and following.live() == second.live()
    assert following.part(0, 0) == (range(0, 2), 1.0)
    assert following.part(10, 0) == ([2, 3], 1.0)


def test_an_evaluation_is_queued_again_as_a_whole() -> None:
    loader = LoaderState()
    cursor = begun(loader)
    cursor.counts = False
    take(cursor, 10)
    loader.commit()  # has no effect on an evaluation
    loader.on_worker_change(WorkerChange((0,), requeues_lost=False, replaced={}))
    queue = cursor.queue
    assert len(queue) == 20 and queue[:2] == [2, 3]


def test_samples_of_a_worker_lost_between_two_passes_are_used_in_the_next_one() -> None:
    loader = LoaderState()
    cursor = begun(loader)
    take(cursor, 8)
    loader.commit()
    take(cursor, 2)  # the last batches of the pass; their step has not counted yet
    theirs = [sample for batch in (8, 9) for sample in cursor.part(batch, 1)[0]]
    loader.end(cursor)
    loader.on_worker_change(WorkerChange((0,), requeues_lost=True, replaced={}))
    loader.commit()  # the other worker's samples count
    resumed = LoaderState()
    saved = msgspec.json.decode(msgspec.json.encode(loader.state()))
    resumed.load(saved, None, StateOrigin(is_resumed=True, has_same_world_size=False))
    for one in (loader, transfer(loader, NEWCOMER), resumed):
        one.my_passes, one.next_epoch = 1, 1
        assert begun(one).queue == theirs
        assert begun(one).queue == []  # once
