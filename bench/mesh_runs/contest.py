"""The controller's side: starts the contenders of a comparison and lets them train in turns.

The time of a step runs from the moment when the last process starts it until the last one has
finished. Stages that run alone have no common step: each has a time of its own.
"""

from __future__ import annotations

import math
import statistics
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.contenders import rank_variables
from harness.ranks import ContenderFailed, Process, RankSet
from harness.session import Session

from mesh_runs.kinds import KINDS, Kind

_FIRST_STEPS = 2  # uncounted: memory is mapped, connections are made
_SAME_LOSS = 1e-3  # the same model and samples: what differs is the order of adding


@dataclass(frozen=True)
class Work:
    """What is trained, and how long."""

    model: str
    microbatches: int
    rounds: int
    steps: int


@dataclass
class Contender:
    """One line of a table, and what its processes have answered, by batch."""

    name: str
    ranks: RankSet
    steps_s: dict[int, list[float]] = field(default_factory=dict)
    own_s: dict[int, list[list[float]]] = field(default_factory=dict)  # by process
    losses: dict[int, float] = field(default_factory=dict)  # after the first turn

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def turn(self, batch: int, steps: int) -> None:
        """Train once; the first turn with a batch is not counted."""
        is_first = batch not in self.losses
        amount = {"warmup": _FIRST_STEPS, "steps": 0} if is_first else {"warmup": 1, "steps": steps}
        answers = self.ranks.ask({"op": "train", "batch": batch, **amount})
        if is_first:
            seen = [a["loss"] for a in answers if not math.isnan(a["loss"])]
            self.losses[batch] = statistics.fmean(seen)
            self.own_s[batch] = [[] for _ in answers]
            self.steps_s[batch] = []
            return
        for mine, answer in zip(self.own_s[batch], answers, strict=True):
            mine += [end - start for start, end in answer["spans"]]
        for step in zip(*(a["spans"] for a in answers), strict=True):
            taken = max(end for _, end in step) - max(start for start, _ in step)
            self.steps_s[batch].append(taken)


def launch(name: str, work: Work, scratch: Path) -> RankSet:
    """Start the processes of one contender."""
    common = {
        "PACELINE_JOB": f"bench-{uuid.uuid4().hex}",
        "BENCH_MODEL": work.model,
        "BENCH_MICROBATCHES": str(work.microbatches),
    }
    world = KINDS[name].world
    processes = [
        Process([sys.executable], {**rank_variables(rank, world, scratch, name), **common})
        for rank in range(world)
    ]
    return RankSet(name, name, world, processes, scratch, module="mesh_runs.rank")


def compare(work: Work, names: Sequence[str], batches: Sequence[int]) -> list[Contender]:
    """Let all contenders train in turns with each batch; return those that came through."""
    with Session() as session:
        contenders = start(session, work, names)
        for batch in batches:
            for number in range(work.rounds + 1):  # the first is not counted
                shift = number % max(1, len(contenders))
                for one in [*contenders[shift:], *contenders[:shift]]:
                    _try_turn(one, batch, work.steps)
    came_through = [one for one in contenders if not one.ranks.has_failed]
    for batch in batches:
        for line in doubts(came_through, batch):
            print(f"  {line}", flush=True)
    return came_through


def start(session: Session, work: Work, names: Sequence[str]) -> list[Contender]:
    """Start the contenders one after the other; those that fail say why and are left out."""
    found = []
    for name in names:
        ranks = session.start(launch, name, work, session.scratch)
        if session.wait_until_ready([ranks]):
            found.append(Contender(name, ranks))
    return found


def _try_turn(one: Contender, batch: int, steps: int) -> None:
    if one.ranks.has_failed:
        return
    try:
        one.turn(batch, steps)
    except ContenderFailed as failure:
        print(f"  {failure}", flush=True)
        one.ranks.stop()  # it may still use the cores, which the other contenders need


def doubts(contenders: Sequence[Contender], batch: int) -> list[str]:
    """Return the reasons to doubt these figures: contenders that did not compute the same."""
    losses = {c.name: c.losses[batch] for c in contenders if c.kind.is_coordinated}
    if not losses or max(losses.values()) <= min(losses.values()) * (1 + _SAME_LOSS):
        return []
    reported = ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items())
    return [f"batch {batch}: losses after {_FIRST_STEPS} steps differ: {reported}"]


def memory_of(work: Work, name: str, batch: int) -> list[dict[str, Any]]:
    """Train a little with one contender alone; return the memory of each process.

    No other program may run meanwhile: it would share the pages of torch's libraries.
    """
    with Session() as session:
        try:
            for contender in start(session, work, [name]):
                request = {"op": "train", "batch": batch, "warmup": work.steps, "steps": 0}
                contender.ranks.ask(request)
                return contender.ranks.ask({"op": "memory"})
        except ContenderFailed as failure:
            print(f"  {failure}", flush=True)
    return []
