"""Push and pull of many parameters by two workers and one server: ours, torch's rpc, the limit.

Each worker pushes a gradient and gets the parameters back, and the server applies SGD for each. A
sample runs from the moment when the last worker starts until the last one has its parameters. The
PAYLOAD is what a network would carry: a gradient and the parameters for each worker.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.contenders import with_servers
from harness.limit import LimitRanks, compile_limit
from harness.ranks import ContenderFailed, Process, RankSet
from harness.report import time_text
from harness.rounds import Plan, Runner, interleave
from harness.session import Session

NUM_WORKERS = 2
# Not of this run: measured once on 2 vCPUs of an AMD EPYC (Zen 3), ZeroMQ over TCP, values of
# 16 MB, nothing done on the server. torch's rpc server had 1.4 GB/s there.
PS_LITE_GB_PER_S = 1.5
_LIMIT_MODES = ("two passes", "one pass", "one pass, streams", "one process")
_LIMIT = Path(__file__).resolve().parent.parent / "server_limit.cc"
_OURS = {
    "paceline-async": "paceline async",
    "paceline-ps": "paceline ps",
    "paceline-any": "paceline, any tensor",
}
_RPC = {"rpc": "torch rpc", "rpc-tcp": "torch rpc, TCP only"}
ALL, FEW = (*_OURS, *_RPC), ("paceline-async", "rpc")


def start_ours(kind: str, scratch: Path) -> RankSet:
    place = with_servers(NUM_WORKERS, 1)
    processes = [replace(place, env={**place.env, "BENCH_WORKERS": str(NUM_WORKERS)})]
    return _ranks(kind, NUM_WORKERS, processes, scratch)


def start_rpc(kind: str, scratch: Path) -> RankSet:
    """Start the workers and, as the last rank, the server."""
    shared = {"BENCH_WORKERS": str(NUM_WORKERS), "BENCH_STORE": str(scratch / f"{kind}.store")}
    world = NUM_WORKERS + 1
    processes = [Process([sys.executable], {**shared, "RANK": str(r)}) for r in range(world)]
    # Its shared-memory transport also polls while no call is in progress. That made everything else
    # in the run, also the limit, 3 × as slow.
    return _ranks(kind, world, processes, scratch, polls=True)


def _ranks(
    kind: str, world: int, processes: list[Process], scratch: Path, *, polls: bool = False
) -> RankSet:
    module = "servers.exchange_rank"
    return RankSet(kind, kind, world, processes, scratch, module=module, polls=polls)


def _runner(label: str, ranks: RankSet) -> Runner:
    def measure(plan: Plan, seed: int) -> list[float]:
        request = {"count": plan.num_bytes // 4, "samples": plan.samples, "warmup": plan.warmup}
        answers = ranks.ask({**request, "seed": seed})
        if any(answer["wrong"] for answer in answers):
            raise ranks.failure("a pull returned wrong parameters")
        spans = [answer["spans"] for answer in answers if answer["spans"]]
        samples = zip(*spans, strict=True)
        return [max(end for _, end in s) - max(start for start, _ in s) for s in samples]

    return Runner(label, measure, ranks.version)


def _limits(session: Session) -> list[Runner]:
    try:
        program = compile_limit(session.scratch, _LIMIT)
    except ContenderFailed as failure:
        print(f"  {failure}")
        return []
    ranks = session.start(LimitRanks, program, NUM_WORKERS)

    def mode_runner(mode: int) -> Runner:
        def measure(plan: Plan, _: int) -> list[float]:
            return ranks.turn(mode, plan.num_bytes, plan.warmup, plan.samples)

        return Runner(f"limit: {_LIMIT_MODES[mode]}", measure, ranks.version)

    return [mode_runner(mode) for mode in range(len(_LIMIT_MODES))]


def measure(plan: Plan, kinds: Sequence[str] = ALL) -> Exchanges:
    """Start the contenders and let them push and pull in turns."""
    print(f"\npush and pull of {plan.num_bytes // 4 / 1e6:g} M float32: starting ...", flush=True)
    labels = {**_OURS, **_RPC}
    with Session() as session:
        sets = [
            session.start(start_ours if kind in _OURS else start_rpc, kind, session.scratch)
            for kind in kinds
        ]
        ready = session.wait_until_ready(sets)
        runners = [_runner(labels[kind], ranks) for kind, ranks in ready.items()]
        runners += _limits(session)
        interleave(runners, plan)
    return Exchanges(runners, plan.num_bytes)


class Exchanges:
    """The table of one size."""

    def __init__(self, runners: Sequence[Runner], num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._times = {r.label: r.times[num_bytes] for r in runners if r.times.get(num_bytes)}
        self.versions = {r.label: r.version for r in runners if not r.label.startswith("limit")}

    def payload_gb(self) -> float:
        return NUM_WORKERS * 2 * self._num_bytes / 1e9

    def seconds(self, label: str) -> tuple[float, float] | None:
        """Return the minimum and the median of a contender, or None if it was not measured."""
        times = self._times.get(label)
        return None if not times else (min(times), statistics.median(times))

    def best(self, prefix: str) -> tuple[float, float] | None:
        """Return minimum and median of the best contender with this name prefix."""
        found = [self.seconds(label) for label in self._times if label.startswith(prefix)]
        pairs = [pair for pair in found if pair is not None]
        return (min(p[0] for p in pairs), min(p[1] for p in pairs)) if pairs else None

    def ratio(self, label: str, reference: str) -> tuple[float, float] | None:
        """Return how many times faster a contender is than the best with this name prefix."""
        mine, theirs = self.seconds(label), self.best(reference)
        if mine is None or theirs is None:
            return None
        return theirs[0] / mine[0], theirs[1] / mine[1]

    def rates(self, label: str) -> tuple[float, float] | None:
        """Return payload GB/s by minimum and by median."""
        found = self.seconds(label)
        if found is None:
            return None
        return self.payload_gb() / found[0], self.payload_gb() / found[1]

    def show(self) -> None:
        millions = self._num_bytes // 4 / 1e6
        print(
            f"\npush+pull of {millions:g} M float32, {NUM_WORKERS} workers, 1 server, SGD applied"
        )
        head = f"{'contender':24} {'min':>9} {'median':>9} {'best GB/s':>9} {'GB/s':>6}"
        print(f"{head}  {'x torch rpc':>11}  {'% of limit':>11}   (payload; by minimum, by median)")
        for label in self._times:
            seconds, rates = self.seconds(label), self.rates(label)
            assert seconds is not None and rates is not None
            text = f"{label:24} {time_text(seconds[0]):>9} {time_text(seconds[1]):>9}"
            text += f" {rates[0]:9.2f} {rates[1]:6.2f}"
            rpc, limit = self.ratio(label, "torch rpc"), self.ratio(label, "limit")
            text += f"  {rpc[0]:5.1f} {rpc[1]:5.1f}" if rpc else " " * 13
            print(text + (f"  {limit[0]:5.0%} {limit[1]:5.0%}" if limit else ""))
        print(f"{'ps-lite, other machine':24} {'':9} {'':9} {PS_LITE_GB_PER_S:9.2f}", flush=True)

    def as_json(self) -> dict[str, Any]:
        return {"bytes": self._num_bytes, "workers": NUM_WORKERS, "seconds": self._times}
