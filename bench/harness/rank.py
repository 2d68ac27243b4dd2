"""One rank of one contender: waits for a turn, does it, answers with its times.

    python -m harness.rank KIND SOCKET BARRIER        (started by harness/ranks.py)

While it is another contender's turn this process sleeps in a read on a Unix socket: it uses no CPU.
Times are read from the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from harness import operations, values
from harness.barrier import SpinBarrier
from harness.controller import take_turns
from harness.subjects import Subject, make


class Bench:
    """The memory that this rank keeps between turns, and the measured loop."""

    def __init__(self, subject: Subject, barrier: SpinBarrier) -> None:
        self._subject, self._barrier = subject, barrier
        self._kept: dict[tuple[str, str, int], tuple[Any, Any]] = {}

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one turn; the answer has [start, end] of each counted sample."""
        op, calls, subject = request["op"], request["calls"], self._subject
        source, target = self._tensors(op, request["memory"], request["bytes"])
        source_view, target_view = subject.view(source), subject.view(target)
        call, spans, wrong = subject.bind(op, source, target), [], 0
        for sample in range(request["warmup"] + request["samples"]):
            seed = request["seed"] + sample
            values.write(source_view, subject.rank, seed)
            self._barrier.wait()
            start_s = time.perf_counter()
            for _ in range(calls):
                call()
            end_s = time.perf_counter()
            if sample >= request["warmup"]:
                spans.append((start_s, end_s))
            place = (subject.rank, subject.world, seed, calls)
            wrong += not operations.is_right(op, source_view, target_view, *place)
        return {"spans": spans, "wrong": wrong}

    def _tensors(self, op: str, memory: str, num_bytes: int) -> tuple[Any, Any]:
        """Return source and target; memory of other sizes is given back first."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[2] == num_bytes}
        key = (op, memory, num_bytes)
        if key not in self._kept:
            sizes = operations.num_elements(op, num_bytes // 4, self._subject.world)
            source = self._subject.allocate(sizes[0], memory)
            target = self._subject.allocate(sizes[1], memory) if sizes[1] else source
            for tensor in (source, target):  # page faults are not what is measured
                values.write(self._subject.view(tensor), 0, 0)
            self._kept[key] = (source, target)
        return self._kept[key]


def main() -> None:
    kind, socket_path, barrier_path = sys.argv[1:]
    subject = make(kind)
    barrier = SpinBarrier(Path(barrier_path), subject.rank, subject.world)
    bench = Bench(subject, barrier)
    introduction = {"rank": subject.rank, "version": subject.version}
    take_turns(socket_path, introduction, bench.turn, at_end=subject.close)


if __name__ == "__main__":
    main()
