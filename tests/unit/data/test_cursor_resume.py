"""Cursors that resume from a checkpoint, with any number of workers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from paceline.data.cursor.cursor import Cursor, StateOrigin
from paceline.data.cursor.indices import IndexCursor, Rules
from paceline.data.cursor.positions import StreamCursor, unread_in
from paceline.data.split.order import LocalOrder
from paceline.data.split.weights import spread
from paceline.errors import DataError


def index_cursor(samples: int, workers: int, per_worker: int, *, drop: bool = False) -> IndexCursor:
    rules = Rules(lambda n: per_worker * n, spread, drop_short=drop, again=list)
    return IndexCursor(rules, LocalOrder(samples, 5), tuple(range(workers)))


def saved(cursor: Cursor, batch: int) -> Any:
    """Return the state in a checkpoint that is saved before a batch."""
    cursor.position = batch
    return json.loads(json.dumps(cursor.state()))


def resumed(cursor: Cursor, state: Any, *, has_same_world_size: bool) -> None:
    cursor.load(state, None, StateOrigin(is_resumed=True, has_same_world_size=has_same_world_size))


def rest(a: IndexCursor, batch: int) -> list[list[int]]:
    """Return the units of all batches from one on."""
    found = []
    while (units := a.units(batch)) is not None:
        found.append([int(unit) for unit in units])
        a.take(batch)
        batch += 1
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_rest_is_the_same_or_split_again(seed: int) -> None:
    chance = random.Random(seed)
    samples, before, after = chance.randint(1, 60), chance.randint(1, 4), chance.randint(1, 4)
    first = index_cursor(samples, before, 2)
    whole = rest(index_cursor(samples, before, 2), 0)
    batch = chance.randint(0, len(whole))
    for number in range(batch):
        first.take(number)
        if chance.random() < 0.2 and before > 1:  # a worker was lost, and replaced
            first.change(tuple(range(before - 1)), requeues_lost=True)
            first.change(tuple(range(before)), requeues_lost=False)
        first.commit(number + 1)
    state = saved(first, batch)
    expected = rest(first, batch)
    same = index_cursor(samples, before, 2)
    resumed(same, state, has_same_world_size=True)
    assert same.position == batch and rest(same, batch) == expected
    other = index_cursor(samples, after, 2)
    resumed(other, state, has_same_world_size=after == before)
    remaining = [unit for units in rest(other, batch) for unit in units]
    assert remaining == [unit for units in expected for unit in units]


def test_units_of_a_lost_worker_are_used_after_a_checkpoint() -> None:
    first = index_cursor(12, 2, 2)
    first.take(0)
    first.change((0,), requeues_lost=True)
    first.commit(1)
    second = index_cursor(12, 3, 1)
    resumed(second, saved(first, 1), has_same_world_size=False)
    units = [unit for units in rest(second, 1) for unit in units]
    assert len(units) == 8 + 2 and second.reassigned == 2
    assert second.dropped(10) == 0


def test_streams_of_other_loaders_cannot_be_continued() -> None:
    first = StreamCursor(lambda n: n, (0, 1), num_sources=2)
    first.use(0, 1)
    state = saved(first, 1)
    with pytest.raises(DataError, match="num_workers is 1, expected 2 as in the checkpoint"):
        resumed(StreamCursor(lambda n: n, (0, 1)), state, has_same_world_size=True)
    same = StreamCursor(lambda n: n, (4, 5), num_sources=2)
    resumed(same, state, has_same_world_size=True)
    assert same.range_of(1).members == (4, 5) and same.range_of(1).first == 0
    other = StreamCursor(lambda n: n, (0, 1, 2), num_sources=2)
    resumed(other, state, has_same_world_size=False)
    assert other.range_of(1).first == 1 and unread_in(other.range_of(1), 1).base == 2


def test_a_checkpoint_without_a_position_in_the_order_continues_after_its_batches() -> None:
    """Older versions wrote such states of passes that were split by speed."""
    state = {**saved(index_cursor(20, 2, 2), 3), "course": {}}
    same = index_cursor(20, 2, 2)
    resumed(same, state, has_same_world_size=True)
    assert rest(same, 3) == rest(index_cursor(20, 2, 2), 0)[3:]


COUNTS = {"next": 2, "samples": 8, "padded": 0, "largest": 2, "repeated": 0}
WRITTEN = {"epoch": 1, "batch": 2, "facts": {}, "order": None, "draws": None, "counts": COUNTS}


def test_checkpoints_are_written_and_read_as_they_were() -> None:
    by_index = {**WRITTEN, "course": {"start": 8, "queue": [3]}}
    of_stream = {
        "stage": [0, [0, 1], []],
        "batches": [[0, 2]],
        "left": [2, [0, 1], [[0, [], 8]]],
        "sources": 1,
    }
    for cursor, state in (
        (index_cursor(12, 2, 2), by_index),
        (StreamCursor(lambda n: 2 * n, (0, 1)), {**WRITTEN, "course": of_stream}),
    ):
        cursor.epoch = 1
        resumed(cursor, state, has_same_world_size=True)
        assert cursor.position == 2 and saved(cursor, 2) == state
