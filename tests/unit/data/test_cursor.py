"""Workers join and leave in the middle of a pass: each sample counts once, whatever happens (O4).

The tests simulate a small job in which every worker has a cursor of its own. The cursors follow
the rules of the membership: all see the same changes, and a worker that lags gets the state of one
that is ahead. Some workers may be one step ahead of others when a worker is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.cursor.indices import IndexCursor, Rules
from paceline.data.cursor.positions import StreamCursor, UnreadPositions, unread_in
from paceline.data.randomness import mix_seeds
from paceline.data.split.order import LocalOrder
from paceline.data.split.weights import deal, deal_or_spread, spread, spread_one

seeds = st.integers(0, 2**32)


class LateEnd:
    """A sequence whose length is known only after units beyond its end were requested."""

    def __init__(self, units: list[Any]) -> None:
        self._units = units
        self.length: int | None = None

    def units(self, start: int, stop: int) -> list[Any]:
        if stop > len(self._units):
            self.length = len(self._units)
        return self._units[start:stop]


class Player:
    """A worker: its cursor, and its own position."""

    def __init__(self, rank: int, cursor: Any) -> None:
        self.rank, self.cursor, self.position = rank, cursor, 0
        self.given: list[list[Any]] = []  # samples of the batches since the last step

    def take(self) -> bool:
        part = self.cursor.part(self.position, self.rank)
        if part is None:
            return False
        units, weight = part
        flat = [x for u in units for x in (u if isinstance(u, list) else [u])] if weight else []
        self.given.append(flat)
        self.position += 1
        self.cursor.take(self.position - 1)
        return True

    def commit(self) -> list[Any]:
        samples, self.given = [x for batch in self.given for x in batch], []
        self.cursor.commit(self.position)
        return samples


def transfer(source: Any, receiver: Any) -> None:
    receiver.load_live(msgspec.msgpack.decode(msgspec.msgpack.encode(source.live())))
    if isinstance(getattr(source, "_sequence", None), LateEnd):
        receiver._sequence.length = source._sequence.length  # sent with the same state


class Play:
    def __init__(self, seed: int, workers: int, make: Any) -> None:
        self.random, self.make = Random(seed), make
        self.players = [Player(rank, make(tuple(range(workers)))) for rank in range(workers)]
        self.next_rank = workers
        self.used: Counter[Any] = Counter()

    def happens(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def run(self, steps: int) -> None:
        """Take steps of one or more batches until the pass is over; things happen meanwhile."""
        for _ in range(steps):
            num_batches = self.random.randint(1, 3)
            took = [self._take(player, num_batches) for player in self.players]
            if self.happens(4) and len(self.players) > 1:
                self._lose(self.players)
            self._commit(num_batches)
            if self.happens(4) and len(self.players) < 7:
                self._join()
            self._agree()
            if not any(took) and self._is_over():
                return
        raise AssertionError("the pass does not end")

    def _take(self, player: Player, count: int) -> int:
        return sum(player.take() for _ in range(count))

    def _commit(self, num_batches: int) -> None:
        """All commit; perhaps a worker is lost while only some have, and are in the next step."""
        num_ahead = len(self.players)
        if num_ahead > 1 and self.happens(5):
            num_ahead = self.random.randint(1, num_ahead - 1)
        ahead, lagging = self.players[:num_ahead], self.players[num_ahead:]
        for player in ahead:
            self.used.update(player.commit())
        if not lagging:
            return
        for player in ahead:
            self._take(player, num_batches)
        source = ahead[-1]
        for player in lagging:
            transfer(source.cursor, player.cursor)
        self._lose([player for player in self.players if player is not source], lagging)
        for player in lagging:
            if player not in self.players:
                continue
            self.used.update(player.commit())
            while player.position < source.position:
                assert player.take()
        for player in self.players:
            self.used.update(player.commit())

    def _lose(self, candidates: list[Player], lagging: Sequence[Player] = ()) -> None:
        lost = self.random.choice(candidates)
        if lost in lagging:  # what it had given to the last step has counted
            self.used.update(lost.commit())
            lost.given = []
        self.players = [player for player in self.players if player is not lost]
        self._change(requeues_lost=True)

    def _change(self, requeues_lost: bool) -> None:
        after = tuple(player.rank for player in self.players)
        for player in self.players:
            player.cursor.change(after, requeues_lost=requeues_lost)

    def _join(self) -> None:
        source = self.players[0]
        cursor = self.make(source.cursor.members)
        transfer(source.cursor, cursor)
        newcomer = Player(self.next_rank, cursor)
        newcomer.position = cursor.committed
        self.next_rank += 1
        self.players.insert(self.random.randint(0, len(self.players)), newcomer)
        self._change(requeues_lost=False)

    def _agree(self) -> None:
        first = self.players[0].cursor.live()
        assert all(player.cursor.live() == first for player in self.players)
        assert len({player.position for player in self.players}) == 1

    def _is_over(self) -> bool:
        return all(p.cursor.part(p.position, p.rank) is None for p in self.players)


def as_units(part: Any) -> list[Any]:
    return list(map(int, part))


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 4), st.integers(1, 70), st.booleans())
def test_samples_count_once(
    seed: int, workers: int, size: int, samples: int, follows: bool
) -> None:
    per_step = (lambda n: n * size) if follows else (lambda _: workers * size)
    rules = Rules(per_step, spread, drop_short=False, again=as_units)
    order = LocalOrder(samples, mix_seeds(1, 2))
    play = Play(seed, workers, lambda members: IndexCursor(rules, order, members))
    play.run(3 * samples + 60)
    assert play.used == Counter(range(samples))


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=25))
def test_batches_of_a_sampler_count_once(seed: int, workers: int, sizes: list[int]) -> None:
    batches, samples = [], 0
    for size in sizes:
        batches.append(list(range(samples, samples + size)))
        samples += size
    is_global = seed % 2 == 0
    cut = spread_one if is_global else deal_or_spread
    per_step = 1 if is_global else workers
    rules = Rules(lambda _: per_step, cut, drop_short=False, again=lambda part: [list(part)])
    play = Play(seed, workers, lambda members: IndexCursor(rules, LateEnd(batches), members))
    play.run(3 * samples + 60)
    assert play.used == Counter(range(samples))


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 30))
def test_single_items_count_once(seed: int, workers: int, samples: int) -> None:
    def one(units: Any, workers: int, index: int) -> Any:
        part, weight = deal(units, workers, index)
        return [part], weight

    rules = Rules(lambda n: n, one, drop_short=False, again=as_units)
    play = Play(seed, workers, lambda members: IndexCursor(rules, range_(samples), members))
    play.run(3 * samples + 60)
    assert play.used == Counter(range(samples))


def range_(samples: int) -> LateEnd:
    return LateEnd(list(range(samples)))


def plain_rules(per_step: int, *, drop_short: bool = False) -> Rules:
    return Rules(lambda _: per_step, spread, drop_short=drop_short, again=as_units)


def test_the_global_batch_stays_and_survivors_get_more() -> None:
    cursor = IndexCursor(plain_rules(6), range_(24), (0, 1, 2))
    assert [cursor.part(0, rank) for rank in range(3)] == [
        ([0, 1], 1.0),
        ([2, 3], 1.0),
        ([4, 5], 1.0),
    ]
    cursor.take(0)
    cursor.change((0, 2), requeues_lost=True)
    assert cursor.part(0, 2) == ([4, 5], 1.0)  # a worker that lags gets it as it was
    assert [cursor.part(1, rank) for rank in (0, 2)] == [([6, 7, 8], 1.0), ([9, 10, 11], 1.0)]
    assert cursor.units(4) == [2, 3]  # after all other units
    assert cursor.units(5) is None


def test_queued_units_come_after_a_short_batch_that_was_taken() -> None:
    cursor = IndexCursor(plain_rules(4), range_(6), (0, 1))
    for batch in range(2):
        assert cursor.part(batch, 0) is not None
        cursor.take(batch)
    cursor.commit(1)
    assert cursor.units(1) == [4, 5] and cursor.units(2) is None
    cursor.change((0,), requeues_lost=True)
    assert cursor.units(1) == [4, 5] and cursor.units(2) == [5] and cursor.units(3) is None


def test_a_short_last_batch_is_dropped_with_the_queue() -> None:
    cursor = IndexCursor(plain_rules(4, drop_short=True), range_(7), (0, 1))
    assert cursor.units(0) == [0, 1, 2, 3] and cursor.units(1) is None
    cursor.take(0)
    cursor.change((0,), requeues_lost=True)
    assert cursor.units(1) == [4, 5, 6, 2] and cursor.units(2) is None


def test_a_replacement_takes_over_the_parts_of_the_lost() -> None:
    cursor = IndexCursor(plain_rules(4), range_(12), (0, 1))
    lost = [cursor.part(batch, 1) for batch in range(3)]
    cursor.take(0)
    cursor.take(1)
    cursor.commit(1)
    ranges = cursor.ranges[0].first
    cursor.change((0, 5), requeues_lost=False, replaced={1: 5})
    assert [cursor.part(batch, 5) for batch in range(3)] == lost
    assert [s.first for s in cursor.ranges] == [ranges]  # prefetched batches stay good


def test_uncommitted_units_at_the_end_of_a_pass_are_carried_over() -> None:
    cursor = IndexCursor(plain_rules(4), range_(8), (0, 1))
    cursor.take(0)
    cursor.commit(1)
    cursor.take(1)
    carried = cursor.uncommitted()
    assert carried == {0: [4, 5], 1: [6, 7]}
    following = IndexCursor(plain_rules(4), range_(8), (0, 1))
    following.carried = carried
    following.change((0,), requeues_lost=True)
    assert following.queue == [6, 7]
    following.commit(0)
    following.change((2,), requeues_lost=True)
    assert following.queue == [6, 7]


class StreamPlayer(Player):
    """Takes from a stream as StridedLoader does, one source."""

    def __init__(self, rank: int, cursor: StreamCursor, samples: int, per_step: Any) -> None:
        super().__init__(rank, cursor)
        self.samples, self.per_step = samples, per_step

    def take(self) -> bool:
        batch_range = self.cursor.range_of(self.position)
        size, workers = self.per_step(len(batch_range.members)), len(batch_range.members)
        numbering = unread_in(batch_range, 0).numbering()
        start = (self.position - batch_range.first) * size
        mine, rest = [], False
        for stream_position in range(self.samples):
            number = numbering(stream_position)
            if number is None or number < start:
                continue
            rest = True
            if number < start + size and (number - start) % workers == batch_range.members.index(
                self.rank
            ):
                mine.append(stream_position)
        if not rest:
            return False
        self.given.append(mine)
        self.position += 1
        self.cursor.take(self.position - 1)
        return True


class StreamPlay(Play):
    def __init__(self, seed: int, workers: int, samples: int, per_step: Any) -> None:
        self._new = lambda rank, cursor: StreamPlayer(rank, cursor, samples, per_step)
        super().__init__(seed, workers, lambda members: StreamCursor(per_step, members))
        self.players = [self._new(p.rank, p.cursor) for p in self.players]

    def _join(self) -> None:
        super()._join()
        self.players = [p if isinstance(p, StreamPlayer) else self._moved(p) for p in self.players]

    def _moved(self, player: Player) -> StreamPlayer:
        made = self._new(player.rank, player.cursor)
        made.position = player.position
        return made

    def _is_over(self) -> bool:
        return True


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_samples_of_a_stream_count_once(
    seed: int, workers: int, size: int, samples: int, follows: bool
) -> None:
    per_step = (lambda n: n * size) if follows else (lambda _: workers * size)
    play = StreamPlay(seed, workers, samples, per_step)
    play.run(3 * samples + 60)
    assert play.used == Counter(range(samples))


def test_unread_positions_are_numbered() -> None:
    unread = UnreadPositions().without(6, [1, 4])
    assert [unread.position(n) for n in range(4)] == [1, 4, 6, 7]
    numbering = unread.numbering()
    assert [numbering(p) for p in range(8)] == [None, 0, None, None, 1, None, 2, 3]
    assert unread.without(1, []) == UnreadPositions((4,), 6)
    assert unread.without(3, [1]) == UnreadPositions((1,), 7)


def test_a_replacement_takes_over_batches_of_a_stream() -> None:
    cursor = StreamCursor(lambda _: 4, (0, 1))
    cursor.take(0)
    cursor.change((0, 7), requeues_lost=False, replaced={1: 7})
    assert cursor.members == (0, 7) and len(cursor.ranges) == 1
    cursor.change((0,), requeues_lost=True)
    assert unread_in(cursor.ranges[-1], 0) == UnreadPositions((1, 3), 4)


def test_weights_add_up() -> None:
    cursor = IndexCursor(plain_rules(8), range_(8), (3, 4, 9))
    weights = [cursor.part(0, rank)[1] for rank in (3, 4, 9)]  # type: ignore[index]
    assert sum(weights) == pytest.approx(3)
