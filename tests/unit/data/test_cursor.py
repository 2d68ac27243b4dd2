"""Workers come and go in the middle of a pass: each sample counts once, whatever happens (O4).

A small job is played, in which every worker has a cursor of its own, told about by nobody but the
rules of the membership: changes at the same places for all, and state from one who is further. Some
workers may be one point ahead of others when somebody is lost.
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
from paceline.data.cursor.positions import Reading, StreamCursor, reading_of
from paceline.data.randomness import mixed
from paceline.data.split.order import LocalOrder
from paceline.data.split.weights import deal, deal_or_spread, spread, spread_one

seeds = st.integers(0, 2**32)


class Told:
    """A sequence whose end is known only to those who have asked for units behind it."""

    def __init__(self, units: list[Any]) -> None:
        self._units = units
        self.length: int | None = None

    def units(self, start: int, stop: int) -> list[Any]:
        if stop > len(self._units):
            self.length = len(self._units)
        return self._units[start:stop]


class Player:
    """A worker: its course, and how many batches it has itself."""

    def __init__(self, rank: int, course: Any) -> None:
        self.rank, self.course, self.cursor = rank, course, 0
        self.given: list[list[Any]] = []  # samples of the batches since the last step

    def take(self) -> bool:
        part = self.course.part(self.cursor, self.rank)
        if part is None:
            return False
        units, weight = part
        flat = [x for u in units for x in (u if isinstance(u, list) else [u])] if weight else []
        self.given.append(flat)
        self.cursor += 1
        self.course.take(self.cursor - 1)
        return True

    def commit(self) -> list[Any]:
        samples, self.given = [x for batch in self.given for x in batch], []
        self.course.commit(self.cursor)
        return samples


def hand_over(donor: Any, receiver: Any) -> None:
    receiver.load_live(msgspec.msgpack.decode(msgspec.msgpack.encode(donor.live())))
    if isinstance(getattr(donor, "_sequence", None), Told):
        receiver._sequence.length = donor._sequence.length  # told in the same parcel


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
        """All commit; perhaps somebody is lost while only some have, and are in the next step."""
        num_ahead = len(self.players)
        if num_ahead > 1 and self.happens(5):
            num_ahead = self.random.randint(1, num_ahead - 1)
        ahead, behind = self.players[:num_ahead], self.players[num_ahead:]
        for player in ahead:
            self.used.update(player.commit())
        if not behind:
            return
        for player in ahead:
            self._take(player, num_batches)
        donor = ahead[-1]
        for player in behind:
            hand_over(donor.course, player.course)
        self._lose([player for player in self.players if player is not donor], behind)
        for player in behind:
            if player not in self.players:
                continue
            self.used.update(player.commit())
            while player.cursor < donor.cursor:
                assert player.take()
        for player in self.players:
            self.used.update(player.commit())

    def _lose(self, candidates: list[Player], behind: Sequence[Player] = ()) -> None:
        lost = self.random.choice(candidates)
        if lost in behind:  # what it had given to the last step has counted
            self.used.update(lost.commit())
            lost.given = []
        self.players = [player for player in self.players if player is not lost]
        self._change(uncounted=True)

    def _change(self, uncounted: bool) -> None:
        after = tuple(player.rank for player in self.players)
        for player in self.players:
            player.course.change(after, uncounted=uncounted)

    def _join(self) -> None:
        donor = self.players[0]
        course = self.make(donor.course.members)
        hand_over(donor.course, course)
        newcomer = Player(self.next_rank, course)
        newcomer.cursor = course.committed
        self.next_rank += 1
        self.players.insert(self.random.randint(0, len(self.players)), newcomer)
        self._change(uncounted=False)

    def _agree(self) -> None:
        first = self.players[0].course.live()
        assert all(player.course.live() == first for player in self.players)
        assert len({player.cursor for player in self.players}) == 1

    def _is_over(self) -> bool:
        return all(p.course.part(p.cursor, p.rank) is None for p in self.players)


def as_units(part: Any) -> list[Any]:
    return list(map(int, part))


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 4), st.integers(1, 70), st.booleans())
def test_samples_count_once(
    seed: int, workers: int, size: int, samples: int, follows: bool
) -> None:
    per_step = (lambda n: n * size) if follows else (lambda _: workers * size)
    rules = Rules(per_step, spread, drop_short=False, again=as_units)
    order = LocalOrder(samples, mixed(1, 2))
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
    play = Play(seed, workers, lambda members: IndexCursor(rules, Told(batches), members))
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


def range_(samples: int) -> Told:
    return Told(list(range(samples)))


def plain_rules(per_step: int, *, drop_short: bool = False) -> Rules:
    return Rules(lambda _: per_step, spread, drop_short=drop_short, again=as_units)


def test_the_global_batch_stays_and_survivors_get_more() -> None:
    course = IndexCursor(plain_rules(6), range_(24), (0, 1, 2))
    assert [course.part(0, rank) for rank in range(3)] == [
        ([0, 1], 1.0),
        ([2, 3], 1.0),
        ([4, 5], 1.0),
    ]
    course.take(0)
    course.change((0, 2), uncounted=True)
    assert course.part(0, 2) == ([4, 5], 1.0)  # one who is behind gets it as it was
    assert [course.part(1, rank) for rank in (0, 2)] == [([6, 7, 8], 1.0), ([9, 10, 11], 1.0)]
    assert course.units(4) == [2, 3]  # behind all others
    assert course.units(5) is None


def test_what_is_queued_comes_behind_a_short_batch_that_was_taken() -> None:
    course = IndexCursor(plain_rules(4), range_(6), (0, 1))
    for batch in range(2):
        assert course.part(batch, 0) is not None
        course.take(batch)
    course.commit(1)
    assert course.units(1) == [4, 5] and course.units(2) is None
    course.change((0,), uncounted=True)
    assert course.units(1) == [4, 5] and course.units(2) == [5] and course.units(3) is None


def test_a_last_batch_that_is_not_full_is_dropped_with_what_is_queued() -> None:
    course = IndexCursor(plain_rules(4, drop_short=True), range_(7), (0, 1))
    assert course.units(0) == [0, 1, 2, 3] and course.units(1) is None
    course.take(0)
    course.change((0,), uncounted=True)
    assert course.units(1) == [4, 5, 6, 2] and course.units(2) is None


def test_a_replacement_takes_over_the_parts_of_the_lost() -> None:
    course = IndexCursor(plain_rules(4), range_(12), (0, 1))
    lost = [course.part(batch, 1) for batch in range(3)]
    course.take(0)
    course.take(1)
    course.commit(1)
    stages = course.stages[0].first
    course.change((0, 5), uncounted=False, replaced={1: 5})
    assert [course.part(batch, 5) for batch in range(3)] == lost
    assert [s.first for s in course.stages] == [stages]  # prefetched batches stay good


def test_what_did_not_count_at_the_end_of_a_pass_is_carried_over() -> None:
    course = IndexCursor(plain_rules(4), range_(8), (0, 1))
    course.take(0)
    course.commit(1)
    course.take(1)
    carried = course.uncommitted()
    assert carried == {0: [4, 5], 1: [6, 7]}
    following = IndexCursor(plain_rules(4), range_(8), (0, 1))
    following.carried = carried
    following.change((0,), uncounted=True)
    assert following.queue == [6, 7]
    following.commit(0)
    following.change((2,), uncounted=True)
    assert following.queue == [6, 7]


class StreamPlayer(Player):
    """Takes from a stream as StridedLoader does, one source."""

    def __init__(self, rank: int, course: StreamCursor, samples: int, per_step: Any) -> None:
        super().__init__(rank, course)
        self.samples, self.per_step = samples, per_step

    def take(self) -> bool:
        stage = self.course.stage(self.cursor)
        size, workers = self.per_step(len(stage.members)), len(stage.members)
        numbering = reading_of(stage, 0).numbering()
        start = (self.cursor - stage.first) * size
        mine, rest = [], False
        for position in range(self.samples):
            number = numbering(position)
            if number is None or number < start:
                continue
            rest = True
            if number < start + size and (number - start) % workers == stage.members.index(
                self.rank
            ):
                mine.append(position)
        if not rest:
            return False
        self.given.append(mine)
        self.cursor += 1
        self.course.take(self.cursor - 1)
        return True


class StreamPlay(Play):
    def __init__(self, seed: int, workers: int, samples: int, per_step: Any) -> None:
        self._new = lambda rank, course: StreamPlayer(rank, course, samples, per_step)
        super().__init__(seed, workers, lambda members: StreamCursor(per_step, members))
        self.players = [self._new(p.rank, p.course) for p in self.players]

    def _join(self) -> None:
        super()._join()
        self.players = [p if isinstance(p, StreamPlayer) else self._moved(p) for p in self.players]

    def _moved(self, player: Player) -> StreamPlayer:
        made = self._new(player.rank, player.course)
        made.cursor = player.cursor
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


def test_a_reading_numbers_what_is_left() -> None:
    reading = Reading().without(6, [1, 4])
    assert [reading.position(n) for n in range(4)] == [1, 4, 6, 7]
    numbering = reading.numbering()
    assert [numbering(p) for p in range(8)] == [None, 0, None, None, 1, None, 2, 3]
    assert reading.without(1, []) == Reading((4,), 6)
    assert reading.without(3, [1]) == Reading((1,), 7)


def test_batches_of_a_stream_are_taken_over_by_name() -> None:
    course = StreamCursor(lambda _: 4, (0, 1))
    course.take(0)
    course.change((0, 7), uncounted=False, replaced={1: 7})
    assert course.members == (0, 7) and len(course.stages) == 1
    course.change((0,), uncounted=True)
    assert reading_of(course.stages[-1], 0) == Reading((1, 3), 4)


def test_weights_add_up() -> None:
    course = IndexCursor(plain_rules(8), range_(8), (3, 4, 9))
    weights = [course.part(0, rank)[1] for rank in (3, 4, 9)]  # type: ignore[index]
    assert sum(weights) == pytest.approx(3)
