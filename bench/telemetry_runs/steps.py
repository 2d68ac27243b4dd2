"""What timing steps costs: the same training with and without it, in turns.

Three comparisons. In the SAME processes telemetry is switched from turn to turn: the cost of timing
and reporting a step. TWO JOBS, as a user starts them, one of them with PACELINE_TELEMETRY=off and
no run directory: the total cost, with what the launcher writes. Equal jobs differ too, because
their memory placement differs: the third comparison measures by how much.

A turn is a second or more of steps, so that each has several of the messages that leave five times
a second; its figure is the mean step of the slowest worker.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.ranks import Process, RankSet
from harness.rounds import Plan, Runner, interleave
from harness.session import Session

_WORKERS = 2
_SILENT = {"PACELINE_TELEMETRY": "off", "PACELINE_LOG_DIR": "none"}


@dataclass
class Line:
    """One line of the table: some workers, and whether their steps are timed in this line's turns
    (None: as their environment says)."""

    label: str
    ranks: RankSet
    times_steps: bool | None
    runner: Runner = field(init=False)

    def __post_init__(self) -> None:
        self.runner = Runner(self.label, self._measure, self.ranks.version)

    def _measure(self, plan: Plan, _: int) -> list[float]:
        request = {"warmup": plan.warmup, "steps": plan.samples, "times_steps": self.times_steps}
        return [max(answer["step_s"] for answer in self.ranks.ask(request))]

    @property
    def turns_s(self) -> list[float]:
        return self.runner.times.get(0, [])


@dataclass(frozen=True)
class Pair:
    """With and without."""

    title: str
    off: Line
    on: Line

    @property
    def ratios(self) -> list[float]:
        """On to off: of the fastest turns, of the median ones, and the median of all rounds'."""
        on, off = self.on.turns_s, self.off.turns_s
        rounds = [one / other for one, other in zip(on, off, strict=True)]
        middle = statistics.median(on) / statistics.median(off)
        return [min(on) / min(off), middle, statistics.median(rounds)]

    def show(self) -> None:
        """Print the two lines."""
        for line in (self.off, self.on):
            times = f"{1e3 * min(line.turns_s):9.3f} {1e3 * statistics.median(line.turns_s):9.3f}"
            shown = "".join(f"{one:9.4f}" for one in self.ratios) if line is self.on else ""
            print(f"  {line.label:34} {times} {shown}", flush=True)

    def as_json(self) -> dict[str, Any]:
        turns = {"off_s": self.off.turns_s, "on_s": self.on.turns_s}
        return {"title": self.title, **turns, "ratios": self.ratios}


def compare(model: str, title: str, rounds: int, steps: int) -> list[Pair]:
    """Train with and without telemetry in turns; show and return the comparisons."""
    print(f"\n{title}, {_WORKERS} workers: {rounds} turns of {steps} steps each", flush=True)
    with Session() as session:
        environs = {"switched": {}, "on": {}, "off": _SILENT, "control": _SILENT}
        sets = {}
        for name, environ in environs.items():
            directory = {"PACELINE_LOG_DIR": str(session.scratch / f"run-{name}"), **environ}
            sets[name] = session.start(_launch, session, model, name, directory)
        ready = session.wait_until_ready(list(sets.values()))
        if len(ready) < len(sets):
            raise SystemExit("telemetry: not all workers came up; see above")
        pairs = [
            Pair(
                "same processes",
                Line("not timed, same processes", sets["switched"], False),
                Line("timed, same processes", sets["switched"], True),
            ),
            Pair(
                "two jobs",
                Line("telemetry off, no run directory", sets["off"], None),
                Line("telemetry on, run directory", sets["on"], None),
            ),
            Pair(
                "two jobs alike",
                Line("telemetry off, again", sets["off"], None),
                Line("telemetry off, another job", sets["control"], None),
            ),
        ]
        lines = [line for pair in pairs for line in (pair.off, pair.on)]
        warmup = max(1, steps // 10)
        interleave([line.runner for line in lines], Plan(0, rounds, steps, warmup))
    if any(line.runner.has_failed for line in lines):
        raise SystemExit("telemetry: a turn was not finished; see above")
    head = f"{'ms for a step':34} {'min':>9} {'median':>9} {'by min':>9}{'median':>9}{'rounds':>9}"
    print(f"  {head}   (times that of the line above)")
    for pair in pairs:
        pair.show()
    return pairs


def _launch(session: Session, model: str, name: str, environ: dict[str, str]) -> RankSet:
    command = [sys.executable, "-m", "paceline", "run", "-n", str(_WORKERS)]
    processes = [Process(command, environ)]
    return RankSet(name, model, _WORKERS, processes, session.scratch, module="telemetry_runs.rank")


def worst(pairs: Sequence[Pair]) -> str:
    """Return the results of the comparisons."""
    return ", ".join(
        f"{pair.title} {100 * (pair.ratios[1] - 1):+.2f} % by median,"
        f" {100 * (pair.ratios[2] - 1):+.2f} % by rounds"
        for pair in pairs
    )
