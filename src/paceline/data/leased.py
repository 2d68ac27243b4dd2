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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.cluster.messages import Answer
from paceline.cluster.notice import WaitNotice
from paceline.cluster.pool_calls import lent
from paceline.cluster.rendezvous import AnyAgent
from paceline.contribution import Announcer
from paceline.data.indexed import IndexedLoader, plain
from paceline.data.passage import Count, Passage
from paceline.data.schedule import cut_portions
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


class LeaseCourse(Count):
    """How far all workers are in the pass: portions that are done. What somebody has in work is not
    among them; a run that goes on from there does it again."""

    def __init__(self, agent: AnyAgent, workers: int) -> None:
        super().__init__()
        self._agent = agent
        self.workers = workers  # for whom the portions are cut; a run that goes on keeps them
        self.name: PoolName | None = None
        self.before: tuple[tuple[int, int], ...] = ()

    def place(self, batch: int) -> dict[str, Any]:  # noqa: ARG002
        """Return everything as plain data, for a run that goes on from a checkpoint. Asks the
        coordinator."""
        done: Sequence[Sequence[int]] = self.before
        if self.name is not None:
            done = self._agent.pool_state(self.name.line, self.name.index).done or done
        return {"workers": self.workers, "done": [list(pair) for pair in done]}

    def begin_at(self, batch: int, place: Mapping[str, Any], *, is_same: bool) -> None:  # noqa: ARG002
        """Go on from there, with any number of workers."""
        self.taken = self.committed = batch
        self.workers = place["workers"]
        self.before = tuple((start, stop) for start, stop in place["done"])

    def pack(self) -> dict[str, Any]:
        """As plain data for a newcomer: the coordinator knows the rest."""
        counts = list(self.counts.items())
        return {"taken": self.taken, "committed": self.committed, "counts": counts}


class LeasedPass:
    """One worker's part in one pass. Main thread only."""

    def __init__(
        self,
        agent: AnyAgent,
        name: PoolName,
        batches: Batches,
        course: LeaseCourse,
        passage: Passage,
        *,
        is_elastic: bool,
    ) -> None:
        self._agent, self._name, self._batches, self._passage = agent, name, batches, passage
        self._is_elastic = is_elastic
        costs = [batches.cost(batch) for batch in range(batches.count)]
        self._portions = cut_portions(costs, course.workers)
        self._before = course.before  # told with the first question
        course.name = name
        self._asked: Future[Answer] | None = None
        self._missing = 0  # portions that others have
        self._to_do: dict[int, int] = {}  # by portion that this worker has: batches to be done
        self._done: list[int] = []  # portions, since the last question
        self._on_way: deque[tuple[int, int]] = deque()  # portion and batch that the loader makes
        self._in_hand: list[int] = []  # portions of the batches that the script has
        self._again = 0  # portions that came back from lost workers, as far as is known

    def run(self, loader: IndexedLoader, announcer: Announcer, worker_seed: int) -> Iterator[Any]:
        """Yield batches until the pool is empty, and in an elastic job until nobody can be lost
        any more that had some of it."""
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

    @property
    def reissued(self) -> int:
        """How many samples were given out again, because a worker was lost or left early that had
        them. Asks the coordinator, if there were any."""
        if not self._again:
            return 0
        again = self._agent.pool_state(self._name.line, self._name.index).again
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
            samples, passage = self._batches.samples(number), self._passage
            passage.tally.note(passage.cursor, samples, samples, 0)
            passage.cursor += 1
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
        before, self._before = self._before, ()
        name, count = self._name, len(self._portions)
        self._asked = self._agent.take_portion(name.line, name.index, count, done, before)

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
            self._agent.settle_portions(self._name.line, self._name.index, tuple(done))

    def _give_back(self) -> None:
        """Leave to others what this worker will not do."""
        # Where nobody can be asked any more, nobody has to be told.
        with contextlib.suppress(PeerError):
            if self._asked is not None:
                self._next_portion()
            held = tuple(self._to_do)
            self._agent.settle_portions(self._name.line, self._name.index, tuple(self._done), held)
