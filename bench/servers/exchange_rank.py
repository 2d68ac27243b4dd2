"""One worker of one server: waits for a turn, pushes and pulls, answers with its times.

    python -m servers.exchange_rank KIND SOCKET BARRIER        (started by servers/exchange.py)

Between turns this process sleeps in a read on a Unix socket. A server that has no program of its
own runs this too; it has nothing to do in a turn, and ends when the controller closes the socket.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from harness import values
from harness.barrier import SpinBarrier
from harness.controller import take_turns

from servers.exchange_kinds import Subject, make
from servers.values import Applied, holds_one_of


class Exchange:
    """What was pushed so far, and the measured loop."""

    def __init__(self, subject: Subject, barrier: SpinBarrier) -> None:
        self._subject, self._barrier = subject, barrier
        self._count, self._applied = 0, Applied()

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one turn; the answer has [start, end] of each counted sample."""
        subject, workers = self._subject, range(self._subject.num_workers)
        if subject.is_server:
            return {"spans": [], "wrong": 0}
        self._prepare(request["count"])
        spans, wrong = [], 0
        for sample in range(request["warmup"] + request["samples"]):
            seed = request["seed"] + sample
            values.write(subject.grad, subject.rank, seed)
            self._barrier.wait()
            start_s = time.perf_counter()
            subject.push_pull()
            end_s = time.perf_counter()
            if sample >= request["warmup"]:
                spans.append((start_s, end_s))
            mine = self._applied.and_pushes_of([subject.rank], seed)
            self._applied = self._applied.and_pushes_of(workers, seed)
            wrong += not holds_one_of(subject.params, [mine, self._applied])
        return {"spans": spans, "wrong": wrong}

    def _prepare(self, count: int) -> None:
        if self._count not in (0, count):
            raise ValueError(f"this worker has {self._count} parameters and was asked for {count}")
        if not self._count:
            self._subject.prepare(count)
            self._count = count


def main() -> None:
    kind, socket_path, barrier_path = sys.argv[1:]
    subject = make(kind)
    barrier = SpinBarrier(Path(barrier_path), subject.rank, subject.num_workers)
    exchange = Exchange(subject, barrier)
    introduction = {"rank": subject.rank, "version": subject.version}
    take_turns(socket_path, introduction, exchange.turn)


if __name__ == "__main__":
    main()
