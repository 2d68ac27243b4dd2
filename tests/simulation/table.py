"""A table that only counts: what replication has to keep, without tensors.

Every client (a worker's rank) adds 1 to its own cell and 1 to the cell of that one addition; the
second shows which ones were applied, and that none was twice. The production Clocks decide when an
addition is answered: at once, when the others are near enough (`ssp`), or when all have committed.

A new copy gets a SKELETON at once, which is all but the cells, and then the cells in PARTS, while
operations go on: one on a cell that has not come yet does nothing, because the part has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from paceline.ps.server.staleness_bound import Clocks

PARTS = 3

Answer = Callable[[int, int, Any, Any], None]  # rank, seq, answer, what follows it


class Table:
    """The state of a partition. `mode`: "sync", "async" or "ssp:<bound>"."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        bound = int(mode[4:]) if mode.startswith("ssp:") else None
        self.clocks = Clocks((), bound=bound)
        self.counts: dict[int, int] = {}  # by rank
        self.cells: dict[tuple[int, int], int] = {}  # by rank and number of the addition
        self.numbers: dict[int, int] = {}  # of the workers that take part, by rank
        self.left: dict[int, int] = {}  # the clocks of numbers that nobody has, or a newcomer
        self.joining: dict[int, tuple[int, int]] = {}  # from the next step on: number and clock
        self.may_repeat: set[int] = set()  # newcomers: a step that their number has done before
        self.parked: dict[int, tuple[int, int, int]] = {}  # by number: rank, seq, addition
        self.absent: set[int] = set()  # parts that have not come yet
        self.step = 0  # how many steps have ended, where all take them together
        self.digest = 0

    # -- for a new copy -----------------------------------------------------------------------

    def skeleton(self) -> Table:
        """Return everything but the cells, for somebody else."""
        bare = copy.copy(self)
        bare.counts, bare.cells, bare.absent = {}, {}, set(range(PARTS))
        return copy.deepcopy(bare)

    def part(self, number: int) -> tuple[int, dict[int, int], dict[tuple[int, int], int]]:
        """Return some cells, as they are now."""
        counts = {rank: n for rank, n in self.counts.items() if rank % PARTS == number}
        return number, counts, {key: n for key, n in self.cells.items() if key[0] % PARTS == number}

    def take_part(
        self, number: int, counts: dict[int, int], cells: dict[tuple[int, int], int]
    ) -> None:
        self.counts |= counts
        self.cells |= cells
        self.absent.discard(number)

    # -- operations ---------------------------------------------------------------------------

    def apply(self, rank: int, seq: int, op: tuple[Any, ...], answer: Answer) -> None:
        """Carry out an operation, and answer whatever can be answered then."""
        self.digest = hash((self.digest, rank, seq, op))
        verb, *args = op
        getattr(self, f"_{verb}")(rank, seq, answer, *args)

    def again(self, rank: int, seq: int, remembered: Any, answer: Answer) -> None:
        """Answer once more what was applied before; values are as they are now."""
        answer(rank, seq, remembered, self.values())

    def values(self) -> dict[int, int]:
        return dict(self.counts)

    def sees(self) -> dict[int, int]:
        """The clock of every worker, by number."""
        return {number: self.clocks.clock(number) for number in self.clocks.workers}

    def _open(self, rank: int, seq: int, answer: Answer, number: int) -> None:
        if self.mode == "sync" and self.parked and number not in self.clocks.workers:
            clock = self.step + 1  # when the step under way has ended
            self.joining[rank] = (number, clock)
        else:
            at = self.step if self.mode == "sync" else self.left.get(number)
            clock = self._seat(rank, number, at)
        if clock:
            self.may_repeat.add(rank)
        if rank % PARTS not in self.absent:
            self.counts.setdefault(rank, 0)
        answer(rank, seq, ("opened", clock), self.values())

    def _seat(self, rank: int, number: int, clock: int | None) -> int:
        if number not in self.clocks.workers:
            self.clocks.join(number, clock)
        self.left.pop(number, None)
        self.numbers[rank] = number
        return self.clocks.clock(number)

    def _add(self, rank: int, seq: int, answer: Answer, addition: int, clock: int) -> None:
        number, now = self.joining.get(rank, (None, 0))
        if number is None:
            number = self.numbers[rank]
            now = self.clocks.clock(number)
        if clock <= now and rank in self.may_repeat:
            # Whoever takes over a number begins where the slowest partition is.
            answer(rank, seq, "repeated", self.values())
            return
        assert clock == now + 1, f"worker {number} adds at clock {clock}, expected {now + 1}"
        self.may_repeat.discard(rank)
        self.parked[number] = (rank, seq, addition)
        if self.mode != "sync":
            self._count(number)
        self._release(answer)

    def _read(self, rank: int, seq: int, answer: Answer) -> None:
        answer(rank, seq, "values", self.values())

    def _gone(self, rank: int, seq: int, answer: Answer, is_replaced: bool) -> None:
        """A worker is out of the job. `is_replaced`: its number waits for a newcomer."""
        number = self.joining.pop(rank, (None, 0))[0]
        if number is not None:
            self.parked.pop(number, None)
        number = self.numbers.pop(rank, None)
        if number is not None:
            if self.parked.get(number, (rank,))[0] == rank:
                self.parked.pop(number, None)
            if not is_replaced and number not in self.numbers.values():
                self.left[number] = self.clocks.clock(number)
                self.clocks.leave(number)
        self._release(answer)

    # -- the clocks ---------------------------------------------------------------------------

    def _count(self, number: int) -> None:
        rank, _, addition = self.parked[number]
        if rank % PARTS not in self.absent:
            self.counts[rank] = self.counts.get(rank, 0) + 1
            self.cells[rank, addition] = self.cells.get((rank, addition), 0) + 1
        self.clocks.applied([number])
        self.clocks.advance(number)

    def _release(self, answer: Answer) -> None:
        if self.mode == "sync":
            self._end_step(answer)
            return
        for number, (rank, seq, _) in list(self.parked.items()):
            if self.clocks.may_read(number):
                del self.parked[number]
                answer(rank, seq, "added", (self.values(), self.sees(), number))

    def _end_step(self, answer: Answer) -> None:
        while True:
            workers = self.clocks.workers
            if any(number not in self.parked for number in workers):
                return
            self.step += bool(workers)
            for number in workers:
                self._count(number)
            done = [self.parked.pop(number) for number in workers]
            for rank, seq, _ in done:
                answer(rank, seq, "added", (self.values(), self.sees(), self.numbers[rank]))
            joining, self.joining = self.joining, {}
            for rank, (number, clock) in joining.items():
                self._seat(rank, number, clock)
            if not joining:
                return
