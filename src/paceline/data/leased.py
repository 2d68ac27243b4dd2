"""A pass whose batches are taken from a pool that all workers share: who is faster takes more.

The batches of the pass are those of the loader in one process, cut into portions (schedule.py)
alike on all workers; which portion is whose, the coordinator decides when it is asked
(cluster/pools.py). A worker asks for its next portion when it begins with the last batch of the one
before, so that nobody waits for the answer. A portion is done when the step that used its last
batch is behind; in an elastic job, when that step was committed. Portions of a lost worker are
taken by the others.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.cluster.messages import Answer
from paceline.cluster.notice import WaitNotice
from paceline.cluster.pool_calls import lent
from paceline.cluster.rendezvous import AnyAgent
from paceline.contribution import Announcer
from paceline.data.indexed import IndexedLoader, plain
from paceline.data.schedule import cut_portions, ranges_of
from paceline.errors import PeerError

_LOOK_S = 0.03


@dataclass(frozen=True)
class Batches:
    """The batches of a pass, as one process would have them."""

    count: int
    make: Callable[[int], Any]  # the indices of a batch
    samples: Callable[[int], int]
    size: int  # samples of one that is full
    cost: Callable[[int], float]


@dataclass(frozen=True)
class PoolName:
    """Which pool of the coordinator's it is."""

    line: str
    index: int


class LeasedPass:
    """One worker's part in one pass. Main thread only."""

    def __init__(
        self,
        agent: AnyAgent,
        name: PoolName,
        batches: Batches,
        workers: int,
        *,
        is_elastic: bool,
        done: Sequence[Sequence[int]] = (),  # ranges of batches, of a pass that was interrupted
    ) -> None:
        self._agent, self._name, self._batches = agent, name, batches
        self._is_elastic = is_elastic
        self._before = {batch for start, stop in done for batch in range(start, stop)}
        left = [batch for batch in range(batches.count) if batch not in self._before]
        portions = cut_portions([batches.cost(batch) for batch in left], workers)
        self._portions = [[left[place] for place in portion] for portion in portions]
        self._asked: Future[Answer] | None = None
        self._to_do: dict[int, int] = {}  # by portion that this worker has: batches to be done
        self._done: list[int] = []  # portions, since the last question
        self._on_way: deque[tuple[int, int]] = deque()  # portion and batch that the loader makes
        self._in_hand: list[tuple[int, int]] = []  # given to the script
        self._used: set[int] = set()  # batches, of portions that are not done
        self.again = 0  # portions that came back from lost workers, as far as is known
        self.taken = 0  # batches, by this worker

    def run(self, loader: IndexedLoader, announcer: Announcer, worker_seed: int) -> Iterator[Any]:
        """Yield batches until the pool is empty, and in an elastic job until nobody can be lost
        any more that had some of it."""
        if not self._portions:
            return
        try:
            first: int | None = self._next_portion()
            while first is not None:
                yield from self._batches_from(first, loader, announcer, worker_seed)
                first = self._late_portion()
        finally:
            self._give_back()

    def on_commit(self) -> None:
        """A step has counted, and what was given for it."""
        self._use_up()

    def pack(self) -> dict[str, Any]:
        """Return as plain data what all workers have done of the pass, and this one's share of
        what is under way. Behind a step: what was given out has counted."""
        state = self._agent.pool_state(self._name.line, self._name.index)
        portions = [portion for start, stop in state.done for portion in range(start, stop)]
        done = {batch for portion in portions for batch in self._portions[portion]}
        given = {batch for _, batch in self._in_hand}
        return {
            "batches": self._batches.count,
            "size": self._batches.size,
            "done": ranges_of(self._before | done | self._used | given),
        }

    # -- taking -------------------------------------------------------------------------------

    def _batches_from(
        self, first: int, loader: IndexedLoader, announcer: Announcer, worker_seed: int
    ) -> Iterator[Any]:
        for batch in loader.begin(self._parts(first), worker_seed):
            if not self._is_elastic:
                self._use_up()  # the script asks for more: it is done with what it had
            portion, number = self._on_way.popleft()
            self._in_hand.append((portion, number))
            self.taken += 1
            announcer.set(self._batches.samples(number) / self._batches.size)
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
        name = self._name
        self._asked = self._agent.take_portion(name.line, name.index, len(self._portions), done)

    def _next_portion(self) -> int | None:
        """Return the portion that was asked for; None: there is none now."""
        if self._asked is None:
            self._ask()
        answer, self._asked = self._asked, None
        assert answer is not None, "it has been asked for"
        found = lent(answer)
        self.again, self._missing = found.again, found.missing
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
        for portion, number in self._in_hand:
            self._used.add(number)
            self._to_do[portion] -= 1
            if not self._to_do[portion]:
                del self._to_do[portion]
                done.append(portion)
                self._used.difference_update(self._portions[portion])
        self._in_hand.clear()
        if done:
            self._done += done  # said again with the next question, which is sure to be heard
            self._agent.settle_portions(self._name.line, self._name.index, tuple(done))

    def _give_back(self) -> None:
        """Leave to others what this worker will not do."""
        # Where nobody can be asked any more, nobody has to be told.
        with contextlib.suppress(PeerError):
            if self._asked is not None:
                self._next_portion()
            held = tuple(self._to_do)
            self._agent.settle_portions(self._name.line, self._name.index, tuple(self._done), held)
