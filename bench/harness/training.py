"""The controller's side of a training benchmark: starts the workers and gives out the turns.

All contenders of one comparison live at the same time, parked, and train in interleaved rounds. The
time of a step is that of the slowest worker. "Turn" is the mean step of a whole turn: it also
counts what a worker left for later, and is not raised by workers that are slow in other steps.
"""

from __future__ import annotations

import statistics
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.contenders import in_private_network, rank_variables, with_servers
from harness.namespaces import Cable
from harness.ranks import ContenderFailed, Process, RankSet
from harness.rounds import Plan, Runner, interleave
from harness.session import Session
from harness.training_kinds import kind_of

_FIRST_STEPS = 3  # uncounted: memory is mapped, and DDP forms its buckets anew after one step
_PARKED_SHARE = 0.02
_SAME_LOSS = 0.01


@dataclass(frozen=True)
class Work:
    """What is trained, and by how many."""

    model: str
    optimizer: str
    world: int
    cable: Cable | None = None  # between two hosts if given
    tensorflow: Path | None = None  # an interpreter that has it

    @property
    def title(self) -> str:
        where = ", two hosts over TCP" if self.cable else ""
        return f"{self.model}, {self.optimizer}, {self.world} workers{where}"


@dataclass
class Contender:
    """One line of the table, and what its workers have answered so far."""

    name: str
    ranks: RankSet
    world: int
    runner: Runner = field(init=False)
    turns_s: list[float] = field(default_factory=list)  # mean step of each turn
    losses: list[float] = field(default_factory=list)  # mean over the workers, after each turn
    sent: list[float] = field(default_factory=list)  # bytes of a host in a step, of each turn
    parked_share: float = 0.0

    def __post_init__(self) -> None:
        self.label = kind_of(self.name).label
        self.runner = Runner(self.label, self._measure, self.ranks.version)

    def _measure(self, plan: Plan, _: int) -> list[float]:
        warmup = plan.warmup if plan.samples else _FIRST_STEPS
        request = {"op": "train", "warmup": warmup, "steps": plan.samples}
        try:
            answers = self.ranks.ask(request)
        except ContenderFailed:
            self.ranks.stop()  # it may still use the cores and the link of the other contenders
            raise
        if kind_of(self.name).is_coordinated and len({a["checksum"] for a in answers}) > 1:
            raise self.ranks.failure("the workers' parameters differ after a turn")
        self.losses.append(statistics.fmean(a["loss"] for a in answers))
        for answer in answers:  # a short time would say nothing
            if answer["parked_s"] > 1.0 and plan.samples:
                share = answer["parked_cpu_s"] / answer["parked_s"]
                self.parked_share = max(self.parked_share, share)
        spans = [answer["spans"] for answer in answers]
        if plan.samples:
            reported = [answer["sent"] for answer in answers if "sent" in answer]
            self.sent += [statistics.fmean(reported) / plan.samples] if reported else []
            self.turns_s.append(max((s[-1][1] - s[0][0]) / len(s) for s in spans))
        steps = zip(*spans, strict=True)
        return [max(end - start for start, end in step) for step in steps]

    def step_times(self) -> list[float]:
        return next(iter(self.runner.times.values()), [])


def launch(work: Work, name: str, number: int, scratch: Path) -> RankSet:
    """Start the workers of one contender; `number` identifies it within this comparison."""
    what = {"BENCH_MODEL": work.model, "BENCH_OPTIMIZER": work.optimizer}
    kind, module = kind_of(name), "harness.training_rank"
    world = 1 if kind.is_alone else work.world
    if kind.library == "tensorflow":  # its chief speaks for all
        places, world, module = [_tensorflow(work)], 1, "servers.tensorflow_chief"
    elif kind.servers:
        if work.cable is not None:
            raise ContenderFailed(f"{name}: is measured on one host only")
        places = [with_servers(world, kind.servers)]
    elif work.cable is not None and world > 1:
        env = {} if kind.is_encrypted else {"PACELINE_ENCRYPT": "off"}
        name_here, port = f"training-{number}", 18600 + number
        places = work.cable.ranks(name_here, scratch, port, per_host=world // 2, env=env)
    else:
        job = {"PACELINE_JOB": f"bench-{uuid.uuid4().hex}"}
        places = [
            Process([sys.executable], {**rank_variables(rank, world, scratch, name), **job})
            for rank in range(world)
        ]
    processes = [replace(place, env={**place.env, **what}) for place in places]
    return RankSet(name, name, world, processes, scratch, module=module)


def _tensorflow(work: Work) -> Process:
    if work.tensorflow is None or (work.model, work.optimizer, work.world) != ("mlp", "sgd", 2):
        raise ContenderFailed(
            "tensorflow: runs the MLP with SGD and 2 workers, in bench/parameter_server.py"
        )
    return Process(in_private_network("tensorflow", [str(work.tensorflow)]))


def start(session: Session, work: Work, names: Sequence[str]) -> list[Contender]:
    """Start the contenders one after the other; those that fail say why and are left out."""
    started = []
    for number, name in enumerate(names):
        try:
            ranks = session.start(launch, work, name, number, session.scratch)
        except ContenderFailed as failure:
            print(f"  {failure}", flush=True)
            continue
        if session.wait_until_ready([ranks]):
            world = 1 if kind_of(name).is_alone else work.world
            started.append(Contender(name, ranks, world))
    return started


def compare(work: Work, names: Sequence[str], *, rounds: int, steps: int) -> list[Contender]:
    """Train with all contenders in turns; return those that came through, with their times."""
    with Session() as session:
        contenders = start(session, work, names)
        plan = Plan(num_bytes=0, rounds=rounds, samples=steps, warmup=1)
        interleave([contender.runner for contender in contenders], plan)
    came_through = [one for one in contenders if not one.runner.has_failed]
    for line in doubts(came_through):
        print(f"  {line}", flush=True)
    return came_through


def doubts(contenders: Sequence[Contender]) -> list[str]:
    """Return the reasons to doubt these figures."""
    lines = [
        f"{one.label}: used {one.parked_share:.0%} of a core while others were measured"
        for one in contenders
        if one.parked_share > _PARKED_SHARE
    ]
    # Same model, same samples, same number of steps: all that exchange gradients learn the same.
    losses = {c.label: c.losses[0] for c in contenders if kind_of(c.name).is_coordinated}
    if losses and max(losses.values()) > min(losses.values()) * (1 + _SAME_LOSS):
        reported = ", ".join(f"{label} {loss:.4f}" for label, loss in losses.items())
        lines.append(f"losses after {_FIRST_STEPS} steps differ: {reported}")
    return lines


def memory_of(work: Work, name: str, steps: int) -> list[dict[str, float]]:
    """Train a little with one contender alone; return the memory of each worker in MB.

    No other program may run meanwhile: it would share the pages of torch's libraries.
    """
    with Session() as session:
        try:
            for contender in start(session, work, [name]):
                contender.ranks.ask({"op": "train", "warmup": 0, "steps": steps})
                return contender.ranks.ask({"op": "memory"})
        except ContenderFailed as failure:
            print(f"  {failure}", flush=True)
    return []


def as_json(contender: Contender) -> dict[str, Any]:
    return {
        "steps_s": contender.step_times(),
        "turns_s": contender.turns_s,
        "losses": contender.losses,
        "sent_bytes": contender.sent,
        "parked_share": contender.parked_share,
        "version": contender.runner.version,
    }
