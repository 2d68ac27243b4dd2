"""The cursor of a pass whose batches come from a common work pool: a faster worker takes more.

The batches of the pass are those of the loader in one process. Every worker cuts them into the same
portions. The coordinator decides which worker gets which portion (work_pools.py in
control/coordinator). A worker asks for its next portion when it starts the last batch of the
current one, so that it does not wait for the answer. A portion is done when the step that used its
last batch is over; in an elastic job, when that step was committed. Portions of a lost worker go to
other workers. A worker that leaves as planned returns the rest of its portions, and no batch is
computed again.

Large portions cost few requests, small ones let all workers end at the same time. So portions
shrink: each is a fixed fraction of what remains, down to a single batch (guided self-scheduling).
No portion has more than 32 batches, because a lost worker's portion is computed again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.control.client.rendezvous import AnyAgent
from paceline.control.client.requests import wait_for_portion
from paceline.control.messages import Answer
from paceline.control.wait_notice import WaitNotice
from paceline.data.cursor.cursor import Cursor, Plain
from paceline.data.sources.indexed import IndexedLoader, plain
from paceline.errors import PeerError
from paceline.runtime.batch_weight import Announcer

_POLL_S = 0.03
_FRACTION = 4  # portions into which a worker's share of what remains is cut
MOST = 32  # batches in a portion


def cut_portions(costs: Sequence[float], workers: int) -> list[range]:
    """Cut a sequence of batches, given the cost of each, into portions for so many workers.

    >>> [len(portion) for portion in cut_portions([1] * 24, 2)]
    [3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    remaining, start, portions = float(sum(costs)), 0, list[range]()
    while start < len(costs):
        most = remaining / (_FRACTION * workers)
        stop, taken = start + 1, float(costs[start])
        while stop < len(costs) and stop - start < MOST and taken + costs[stop] <= most:
            taken += costs[stop]
            stop += 1
        portions.append(range(start, stop))
        start, remaining = stop, remaining - taken
    return portions


@dataclass(frozen=True)
class Batches:
    """The batches of a pass, as one process would have them."""

    parts: Sequence[Any]  # the indices of each
    samples: Sequence[int]
    size: int  # samples of a full batch
    costs: Sequence[float]


class LeasedCursor(Cursor):
    """The portions of a pass that are done, by all workers. A resumed run repeats portions that
    were under way. Hands out this worker's batches. Main thread only."""

    def __init__(
        self, agent: AnyAgent, loader_key: str, batches: Batches, workers: int, *, is_elastic: bool
    ) -> None:
        super().__init__()
        self._agent, self._loader_key, self._batches = agent, loader_key, batches
        self._is_elastic = is_elastic
        self._workers = workers  # that portions are cut for; a resumed run keeps this number
        self._before: tuple[tuple[int, int], ...] = ()  # done in the resumed run
        self._portions: list[range] = []
        self._requested: Future[Answer] | None = None
        self._has_requested = False
        self._missing = 0  # portions that other workers have
        self._to_do: dict[int, int] = {}  # by portion of this worker: batches to be done
        self._begun: dict[int, int] = {}  # by portion of this worker: batches that another has done
        self._done: list[int] = []  # portions, since the last request
        self._in_loader: deque[tuple[int, int]] = deque()  # portion and batch that the loader makes
        self._in_use: list[int] = []  # portions of the batches that the script has
        self._again = 0  # portions of lost workers that were handed out again, as far as known

    def _remaining_state(self) -> dict[str, Any]:
        """Return which portions are done, as the coordinator reports them."""
        found: Sequence[Sequence[int]] = self._agent.pool_state(*self._pool).done
        return {"workers": self._workers, "done": [list(pair) for pair in found or self._before]}

    def _load_remaining(self, batch: int, rest: Plain, *, has_same_world_size: bool) -> None:  # noqa: ARG002
        """Continue with any number of workers."""
        self._workers = rest["workers"]
        self._before = tuple((start, stop) for start, stop in rest["done"])

    @property
    def _pool(self) -> tuple[str, int]:
        """The name of the work pool at the coordinator."""
        return self._loader_key, self.index

    def run(self, loader: IndexedLoader, announcer: Announcer, worker_seed: int) -> Iterator[Any]:
        """Yield batches until the pool is empty. In an elastic job, also wait until no worker
        holds a portion that a loss could return to the pool."""
        self._portions = cut_portions(self._batches.costs, self._workers)
        try:
            first = self._next_portion()
            while first is not None:
                yield from self._batches_from(first, loader, announcer, worker_seed)
                first = self._late_portion()
        finally:
            self.return_portions()

    def on_commit(self) -> None:
        """Note that a step has counted, and with it the batches that the script has."""
        self._finish_batches()

    def count_again(self) -> int:
        """Return how many samples were handed out again because their worker was lost or left
        early. Asks the coordinator if there were any."""
        if not self._again:
            return 0
        again = self._agent.pool_state(*self._pool).again
        return sum(self._batches.samples[n] for portion in again for n in self._portions[portion])

    # -- taking -------------------------------------------------------------------------------

    def _batches_from(
        self, first: int, loader: IndexedLoader, announcer: Announcer, worker_seed: int
    ) -> Iterator[Any]:
        for batch in loader.begin(self._parts(first), worker_seed):
            if not self._is_elastic:
                self._finish_batches()  # the script asks for more, so its batch is done
            portion, number = self._in_loader.popleft()
            self._in_use.append(portion)
            samples = self._batches.samples[number]
            self.tally.note(self.position, samples, samples, 0)
            self.position += 1
            announcer.set(samples / self._batches.size, samples)
            yield batch
        self._finish_batches()

    def _parts(self, first: int) -> Iterator[Any]:
        """Yield the indices of batches. The loader may read ahead of the script."""
        portion: int | None = first
        while portion is not None:
            numbers = self._portions[portion][self._begun.get(portion, 0) :]
            for number in numbers:
                if number == numbers[-1]:
                    self._request_portion()
                self._in_loader.append((portion, number))
                yield plain(self._batches.parts[number])
            portion = self._next_portion()

    def _request_portion(self) -> None:
        done, self._done = tuple(self._done), []
        before = () if self._has_requested else self._before
        self._has_requested = True
        self._requested = self._agent.take_portion(*self._pool, len(self._portions), done, before)

    def _next_portion(self) -> int | None:
        """Return the requested portion; None if there is none now."""
        if self._requested is None:
            self._request_portion()
        answer, self._requested = self._requested, None
        assert answer is not None, "a portion was requested"
        found = wait_for_portion(answer)
        self._again, self._missing = found.again, found.missing
        if found.portion < 0:
            return None
        self._begun[found.portion] = found.begun
        self._to_do[found.portion] = len(self._portions[found.portion]) - found.begun
        return found.portion

    def _late_portion(self) -> int | None:
        """In an elastic job, wait for portions of other workers, which a loss returns to the
        pool."""
        notice = WaitNotice(
            "this worker has done its part of the data, and waits for the other workers"
        )
        while (portion := self._next_portion()) is None:
            if not (self._is_elastic and self._missing):
                return None
            notice.check()
            time.sleep(_POLL_S)
        return portion

    # -- done ---------------------------------------------------------------------------------

    def _finish_batches(self) -> None:
        """Note that the script is done with the batches that it has."""
        done: list[int] = []
        for portion in self._in_use:
            self._to_do[portion] -= 1
            if not self._to_do[portion]:
                del self._to_do[portion]
                done.append(portion)
        self._in_use.clear()
        if done:
            self._done += done  # repeated in the next request, which is certain to arrive
            self._agent.settle_portions(*self._pool, tuple(done))

    def return_portions(self) -> None:
        """Return what this worker will not compute. May be called twice."""
        # Without a coordinator there is no pool to return them to.
        with contextlib.suppress(PeerError):
            if self._requested is not None:
                self._next_portion()
            # Whether the script has used a batch that is not committed is not known.
            unsure = tuple(portion for portion in self._to_do if portion in self._in_use)
            begun = tuple(
                (portion, len(self._portions[portion]) - to_do)
                for portion, to_do in self._to_do.items()
                if portion not in unsure
            )
            self._agent.settle_portions(*self._pool, tuple(self._done), unsure, begun)
            self._to_do.clear()
            self._in_use.clear()
