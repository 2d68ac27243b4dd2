"""A simulated worker: the production books of unanswered requests around a client that counts.

It adds to its cells in all partitions, waits until all have answered, and does so again; and it
reads now and then, whatever else it waits for. What it asked and was told goes into a history.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.control.member import Membership
from paceline.ps.client.failover import (
    Connect,
    PendingRequest,
    PendingRequests,
    Primary,
    choose_action,
)
from simulation.member import SimMember
from simulation.network import End
from support.history import Sight

if TYPE_CHECKING:
    from simulation.job import SimJob

READ_S = 0.4

OnAnswer = Callable[[Any, Any], None]  # the answer, and what follows it


class Line:
    """A worker's line to whoever answers for a partition."""

    def __init__(self, worker: SimWorker, partition: int) -> None:
        self.worker, self.partition = worker, partition
        self.books: PendingRequests[tuple[Any, OnAnswer]] = worker.job.cores.books()
        self.used: Primary | None = None
        self.broken: Primary | None = None
        self._asked: dict[int, PendingRequest[tuple[Any, OnAnswer]]] = {}
        self._end: End | None = None
        self._is_up = False

    def review(self) -> None:
        """Go over to another server, if the newest membership says so."""
        worker, membership = self.worker, self.worker.membership
        assert membership is not None
        found = choose_action(membership, self.partition, worker.rank, self.used, self.broken)
        if not isinstance(found, Connect):
            return
        if self._end is not None:
            self._end.close()
        self.used, self._is_up = found.primary, False
        server = worker.job.by_rank[found.primary.server].name
        self._end = worker.network.connect(
            worker,
            server,
            f"line {self.partition} {found.primary.since} {worker.rank} {membership.generation}",
            pulses=True,
        )

    def on_open(self) -> None:
        self._is_up = True
        for numbered in self.books:
            self._send(numbered)

    def on_end(self, end: End, why: str) -> None:
        if end is not self._end:
            return
        self._end, self._is_up = None, False
        self.broken, self.used = self.used, None
        assert self.broken is not None
        self.worker.accuse_later(self.broken.server, f"the line is broken ({why})")
        self.review()

    def ask(self, op: Any, on_answer: OnAnswer) -> None:
        numbered = self.books.add((op, on_answer))
        self._asked[numbered.seq] = numbered
        if self._is_up:
            self._send(numbered)

    def _send(self, numbered: PendingRequest[tuple[Any, OnAnswer]]) -> None:
        assert self._end is not None
        self._end.send((numbered.seq, numbered.content[0]))

    def on_answer(self, end: End, seq: int, answer: Any, extra: Any) -> None:
        numbered = self._asked.pop(seq, None)
        if numbered is None or end is not self._end:
            return
        self.books.answered(seq)
        numbered.content[1](answer, extra)


class SimWorker(SimMember):
    """A worker that counts."""

    def __init__(self, job: SimJob, *args: Any, **kwargs: Any) -> None:
        super().__init__(job, *args, **kwargs)
        self.lines: dict[int, Line] = {}
        self.additions = 0
        self._clock: int | None = None  # steps that its number has committed everywhere
        self._waits_for = 0
        self._reads = 0  # under way
        self._is_unwanted = False

    def on_membership(self, membership: Membership) -> None:
        if not self.lines:
            for partition in range(len(membership.partitions)):
                self.lines[partition] = Line(self, partition)
            self._open_tables()
        for line in self.lines.values():
            line.review()
        self.after(self.dice.uniform(0.0, 0.1), self._adopt_at_boundary)

    def _adopt_at_boundary(self) -> None:
        self.adopt()

    def on_unwanted(self) -> None:
        self._is_unwanted = True

    def on_line(self, end: End) -> None:
        self._line_of(end).on_open()

    def on_line_end(self, end: End, why: str) -> None:
        self._line_of(end).on_end(end, why)

    def on_line_message(self, end: End, message: Any) -> None:
        self._line_of(end).on_answer(end, *message)

    def _line_of(self, end: End) -> Line:
        return self.lines[int(end.what.split()[1])]

    def is_broken(self, rank: int) -> bool:
        return any(
            line.used is None and line.broken is not None and line.broken.server == rank
            for line in self.lines.values()
        )

    # -- what it does -------------------------------------------------------------------------

    def _open_tables(self) -> None:
        self._waits_for = len(self.lines)
        for line in self.lines.values():
            line.ask(("open", self.number), self._on_opened)

    def _on_opened(self, answer: Any, extra: Any) -> None:
        _, clock = answer
        self._clock = clock if self._clock is None else min(clock, self._clock)
        self._waits_for -= 1
        if not self._waits_for:
            self._next()
            self.after(self.dice.uniform(0.0, READ_S), self._read)

    def _next(self) -> None:
        if self._is_unwanted:
            self.leave(is_finished=False)
        else:
            self.after(self.dice.uniform(0.02, 0.25), self._add)

    def _add(self) -> None:
        assert self._clock is not None
        self.additions += 1
        self._waits_for = len(self.lines)
        for partition, line in self.lines.items():
            call = self.oracle.began(self.rank, partition, "add", self.world.now_s, 1)
            self.oracle.issued(self.rank, partition, self.additions)
            on_answer = functools.partial(self._on_added, partition, call)
            line.ask(("add", self.additions, self._clock + 1), on_answer)

    def _on_added(self, partition: int, call: int, answer: Any, extra: Any) -> None:
        if answer == "added":
            self.oracle.ended(call, self.world.now_s)
            self.oracle.acked(self.rank, partition, self.additions)
            _, sees, number = extra if isinstance(extra, tuple) else (extra, {}, None)
            if number is not None:  # else it was answered again, with nothing but values
                started_s = self.oracle.history.calls[call].invoked_s
                sight = Sight(number, sees[number], sees, started_s, self.world.now_s)
                self.oracle.saw(partition, sight)
        self._waits_for -= 1
        if not self._waits_for:
            assert self._clock is not None
            self._clock += 1
            self._next()

    def _read(self) -> None:
        self.after(self.dice.uniform(0.5 * READ_S, 1.5 * READ_S), self._read)
        if self._reads >= 3:
            return
        self._reads += 1
        partition = self.dice.choice(list(self.lines))
        ranks = self.oracle.readable(partition, self.dice)
        calls = {r: self.oracle.began(r, partition, "read", self.world.now_s) for r in ranks}

        def done(answer: Any, extra: Any) -> None:
            self._reads -= 1
            for rank, call in calls.items():
                self.oracle.ended(call, self.world.now_s, extra.get(rank, 0))

        self.lines[partition].ask(("read",), done)
