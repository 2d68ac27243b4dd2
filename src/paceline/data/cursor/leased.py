"""The cursor of a pass whose batches are taken from a common pool: who is faster takes more.

The batches of the pass are those of the loader in one process, cut into portions alike on all
workers; which portion is whose, the coordinator decides when it is asked
(control/coordinator/work_pools.py). A worker asks for its next portion when it begins with the last
batch of the one before, so that nobody waits for the answer. A portion is done when the step that
used its last batch is over; in an elastic job, when that step was committed. Portions of a lost
worker are taken by the others.

Large portions cost few questions, small ones let all workers end together. So portions shrink: each
is a fixed fraction of what is left, down to a single batch (guided self-scheduling). None is larger
than a few dozen batches, because that much is computed again when a worker is lost.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.control.client.rendezvous import AnyAgent
from paceline.control.client.requests import lent
from paceline.control.transport.messages import Answer
from paceline.control.wait_notice import WaitNotice
from paceline.data.cursor.cursor import Cursor, Plain
from paceline.data.sources.indexed import IndexedLoader, plain
from paceline.errors import PeerError
from paceline.runtime.batch_weight import Announcer

_LOOK_S = 0.03
_FRACTION = 4  # of what is left, a worker's share is cut into so many portions
MOST = 32  # batches in a portion


def cut_portions(costs: Sequence[float], workers: int) -> list[range]:
    """Cut a row of batches, given what each costs, into portions for so many workers.

    >>> [len(portion) for portion in cut_portions([1] * 24, 2)]
    [3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    left, start, portions = float(sum(costs)), 0, list[range]()
    while start < len(costs):
        most = left / (_FRACTION * workers)
        stop, taken = start + 1, float(costs[start])
        while stop < len(costs) and stop - start < MOST and taken + costs[stop] <= most:
            taken += costs[stop]
            stop += 1
        portions.append(range(start, stop))
        start, left = stop, left - taken
    return portions


@dataclass(frozen=True)
class Batches:
    """The batches of a pass, as one process would have them."""

    count: int
    make: Callable[[int], Any]  # the indices of a batch
    samples: Callable[[int], int]
    size: int  # samples of one that is full
    cost: Callable[[int], float]


class LeasedCursor(Cursor):
    """How far all workers are in the pass: portions that are done. What somebody has in work is not
    among them; a run that goes on from there does it again. Hands out this worker's batches. Main
    thread only."""

    def __init__(
        self, agent: AnyAgent, line: str, batches: Batches, workers: int, *, is_elastic: bool
    ) -> None:
        super().__init__()
        self._agent, self._line, self._batches = agent, line, batches
        self._is_elastic = is_elastic
        self._workers = workers  # for whom the portions are cut; a run that goes on keeps them
        self._before: tuple[tuple[int, int], ...] = ()  # done in the run before
        self._portions: list[range] = []
        self._asked: Future[Answer] | None = None
        self._has_asked = False
        self._missing = 0  # portions that others have
        self._to_do: dict[int, int] = {}  # by portion that this worker has: batches to be done
        self._done: list[int] = []  # portions, since the last question
        self._on_way: deque[tuple[int, int]] = deque()  # portion and batch that the loader makes
        self._in_hand: list[int] = []  # portions of the batches that the script has
        self._again = 0  # portions that came back from lost workers, as far as is known

    def _rest(self) -> dict[str, Any]:
        """Return which portions are done. Asks the coordinator."""
        found: Sequence[Sequence[int]] = self._agent.pool_state(*self._pool).done
        return {"workers": self._workers, "done": [list(pair) for pair in found or self._before]}

    def _begin_at(self, batch: int, rest: Plain, *, is_same: bool) -> None:  # noqa: ARG002
        """Go on from there, with any number of workers."""
        self._workers = rest["workers"]
        self._before = tuple((start, stop) for start, stop in rest["done"])

    @property
    def _pool(self) -> tuple[str, int]:
        """Which pool of the coordinator's it is."""
        return self._line, self.index

    def run(self, loader: IndexedLoader, announcer: Announcer, worker_seed: int) -> Iterator[Any]:
        """Yield batches until the pool is empty, and in an elastic job until nobody can be lost
        any more that had some of it."""
        costs = [self._batches.cost(batch) for batch in range(self._batches.count)]
        self._portions = cut_portions(costs, self._workers)
        try:
            first = self._next_portion()
            while first is not None:
                yield from self._batches_from(first, loader, announcer, worker_seed)
                first = self._late_portion()
        finally:
            self._give_back()

    def on_commit(self) -> None:
        """A step has counted, and what was given for it."""
        self._use_up()

    def count_again(self) -> int:
        """Return how many samples were given out again, because a worker was lost or left early
        that had them. Asks the coordinator, if there were any."""
        if not self._again:
            return 0
        again = self._agent.pool_state(*self._pool).again
        return sum(self._batches.samples(n) for portion in again for n in self._portions[portion])

    # -- taking -------------------------------------------------------------------------------

    def _batches_from(
        self, first: int, loader: IndexedLoader, announcer: Announcer, worker_seed: int
    ) -> Iterator[Any]:
        for batch in loader.begin(self._parts(first), worker_seed):
            if not self._is_elastic:
                self._use_up()  # the script asks for more: it is done with what it had
            portion, number = self._on_way.popleft()
            self._in_hand.append(portion)
            samples = self._batches.samples(number)
            self.tally.note(self.position, samples, samples, 0)
            self.position += 1
            announcer.set(samples / self._batches.size, samples)
            yield batch
        self._use_up()

    def _parts(self, first: int) -> Iterator[Any]:
        """Yield the indices of batches, for the loader, which may be some ahead of the script."""
        portion: int | None = first
        while portion is not None:
            numbers = self._portions[portion]
            for number in numbers:
                if number == numbers[-1]:
                    self._ask()
                self._on_way.append((portion, number))
                yield plain(self._batches.make(number))
            portion = self._next_portion()

    def _ask(self) -> None:
        done, self._done = tuple(self._done), []
        before = () if self._has_asked else self._before
        self._has_asked = True
        self._asked = self._agent.take_portion(*self._pool, len(self._portions), done, before)

    def _next_portion(self) -> int | None:
        """Return the portion that was asked for; None: there is none now."""
        if self._asked is None:
            self._ask()
        answer, self._asked = self._asked, None
        assert answer is not None, "it has been asked for"
        found = lent(answer)
        self._again, self._missing = found.again, found.missing
        if found.portion < 0:
            return None
        self._to_do[found.portion] = len(self._portions[found.portion])
        return found.portion

    def _late_portion(self) -> int | None:
        """In an elastic job: wait for what others have, which comes back if one of them is lost."""
        notice = WaitNotice("this worker has done its part of the data, and waits for the others'")
        while (portion := self._next_portion()) is None:
            if not (self._is_elastic and self._missing):
                return None
            notice.check()
            time.sleep(_LOOK_S)
        return portion

    # -- done ---------------------------------------------------------------------------------

    def _use_up(self) -> None:
        """Note that what the script had been given is behind it."""
        done: list[int] = []
        for portion in self._in_hand:
            self._to_do[portion] -= 1
            if not self._to_do[portion]:
                del self._to_do[portion]
                done.append(portion)
        self._in_hand.clear()
        if done:
            self._done += done  # said again with the next question, which is sure to be heard
            self._agent.settle_portions(*self._pool, tuple(done))

    def _give_back(self) -> None:
        """Leave to others what this worker will not do."""
        # Where nobody can be asked any more, nobody has to be told.
        with contextlib.suppress(PeerError):
            if self._asked is not None:
                self._next_portion()
            held = tuple(self._to_do)
            self._agent.settle_portions(*self._pool, tuple(self._done), held)
