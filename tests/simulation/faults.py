"""What goes wrong, and when: a plan that is drawn from the seed before anything happens.

A fault names its victim by a number between 0 and 1, which is looked up among whoever is there when
the moment has come. The plan is a list, so that faults can be left out one by one to see which of
them it takes (`shrink` in runner.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from simulation.process import Process

if TYPE_CHECKING:
    from simulation.job import SimJob

T = TypeVar("T")

# How often each kind is drawn; those of the second group need several hosts.
KINDS = {
    "kill server": 5,
    "kill worker": 4,
    "kill coordinator": 3,
    "tear journal": 2,
    "stop server": 3,
    "stop worker": 2,
    "stop coordinator": 1,
    "starve server": 2,
    "starve worker": 1,
    "starve coordinator": 1,
    "slow": 3,
    "scale": 2,
    "add server": 2,
    "remove server": 2,
}
NETWORK_KINDS = {
    "cut": 4,
    "cut one way": 4,
    "cut home": 3,
    "isolate": 3,
    "split": 2,
    "swizzle": 2,
    "drop": 6,
    "far": 2,
}
# Only in plans about notices (job.py): a host goes away after `lasts_s`, and says so before.
NOTICE, WITHDRAWN = "notice", "withdrawn notice"
# What a plan may prefer: these are drawn as often as all others together.
TASTES = (
    (),
    ("kill server",),
    ("kill server", "add server", "remove server"),
    ("kill coordinator", "tear journal"),
    ("drop", "cut one way"),
    ("swizzle", "split"),
    ("cut home", "isolate"),
    ("stop server", "starve server"),
)
_WISHES = ("scale", "add server", "remove server")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong (or that a person asks for)."""

    at_s: float
    kind: str
    pick: float  # which of the possible victims
    other: float  # a second choice, such as the other end of a link
    lasts_s: float

    @property
    def is_wish(self) -> bool:
        """Whether it is no fault, but what a person asks for."""
        return self.kind in _WISHES

    @property
    def is_notice(self) -> bool:
        """Whether a host goes away that has said so before."""
        return self.kind in (NOTICE, WITHDRAWN)


def draw(dice: random.Random, until_s: float, *, num: int, has_network: bool) -> list[Fault]:
    """Draw a plan; everything is over (healed, continued) at `until_s`.

    Half of the faults follow shortly after the one before: when it is being dealt with.
    """
    weights = KINDS | (NETWORK_KINDS if has_network else {})
    taste = [kind for kind in dice.choice(TASTES) if kind in weights]
    total = sum(weights.values())
    weights |= {kind: total // len(taste) for kind in taste}
    plan: list[Fault] = []
    for _ in range(num):
        at_s = dice.uniform(1.0, until_s - 0.5)
        if plan and dice.random() < 0.5:
            at_s = min(plan[-1].at_s + dice.expovariate(1 / 0.5), until_s - 0.1)
        kind = dice.choices(list(weights), list(weights.values()))[0]
        lasts_s = dice.choice([dice.uniform(0.05, 1.0), dice.uniform(1.0, 3.0), until_s])
        plan.append(Fault(at_s, kind, dice.random(), dice.random(), min(lasts_s, until_s - at_s)))
    return sorted(plan, key=lambda fault: fault.at_s)


def draw_notices(dice: random.Random, until_s: float, num: int, lasts_s: float) -> list[Fault]:
    """Draw notices of hosts that go away after `lasts_s`; some are withdrawn after that."""
    kinds = [NOTICE, NOTICE, NOTICE, WITHDRAWN]
    plan = [
        Fault(dice.uniform(1.0, until_s), dice.choice(kinds), dice.random(), dice.random(), lasts_s)
        for _ in range(num)
    ]
    return sorted(plan, key=lambda fault: fault.at_s)


class Nemesis:
    """Carries a plan out."""

    def __init__(self, job: SimJob, plan: Sequence[Fault]) -> None:
        self._job, self._world = job, job.world
        for fault in plan:
            self._world.after(fault.at_s, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        verb, _, role = fault.kind.partition(" ")
        if fault.kind in ("add server", "remove server", "scale"):
            self._job.launcher.wish(fault.kind, fault.pick)
        elif fault.kind in (NOTICE, WITHDRAWN):
            self._notice(fault)
        elif verb in ("kill", "stop", "starve"):
            victim = _choose(self._victims(role), fault.pick)
            if victim is None:
                return
            if verb == "kill":
                victim.crash()
            else:
                victim.pause("stopped" if verb == "stop" else "starved")
                self._world.after(fault.lasts_s, victim.resume)
        elif verb == "tear":
            self._job.coordinator.tear_at = fault.other * 1.5
        elif verb == "slow":
            self._slow(fault)
        else:
            getattr(self, f"_{fault.kind.replace(' ', '_')}")(fault)

    def _notice(self, fault: Fault) -> None:
        """Let a host go away after a notice; if that is withdrawn, the host stays."""
        host = _choose([one for one in self._job.hosts() if one != "home"], fault.pick)
        if host is None or host in self._job.leaving_hosts:
            return
        self._job.leaving_hosts.add(host)
        self._plan_leave(host, fault.other < 0.5)
        self._world.after(fault.lasts_s, self._end_notice, host, fault.kind)

    def _plan_leave(self, host: str, waits: bool) -> None:
        if host in self._job.leaving_hosts:
            self._job.launcher.plan_leave(host, waits=waits)
            # Again and again: a process that was starting there may have joined.
            self._world.after(0.5, self._plan_leave, host, waits)

    def _end_notice(self, host: str, kind: str) -> None:
        self._job.leaving_hosts.discard(host)  # there is another host with that name
        here = [member for member in self._job.living() if member.host == host]
        if kind == WITHDRAWN:
            self._job.launcher.withdraw_leave([member.rank for member in here])
            return
        for member in here:
            self._job.oracle.counted["processes lost at a deadline"] += 1
            member.crash("its host is gone")

    def _victims(self, role: str) -> list[Process]:
        if role == "coordinator":
            return [self._job.coordinator] if self._job.coordinator.is_alive else []
        return [member for member in self._job.living() if member.role == role]

    def _slow(self, fault: Fault) -> None:
        victim = _choose([*self._job.living(), self._job.coordinator], fault.pick)
        if victim is None or not victim.is_alive:
            return
        victim.lag_s = 0.001 + 0.01 * fault.other
        self._world.say(victim.name, "is slow: {:.4f} s for everything", victim.lag_s)
        life = victim.life

        def recover() -> None:
            if victim.life == life:
                victim.lag_s = 0.0

        self._world.after(fault.lasts_s, recover)

    # -- the network --------------------------------------------------------------------------

    def _pair(self, fault: Fault) -> tuple[str, str] | None:
        hosts = self._job.hosts()
        one = _choose(hosts, fault.pick)
        other = _choose([host for host in hosts if host != one], fault.other)
        return None if one is None or other is None else (one, other)

    def _cut_for(self, pairs: Sequence[tuple[str, str]], lasts_s: float) -> None:
        network = self._job.network
        for source, target in pairs:
            network.cut(source, target)
            self._world.after(lasts_s, network.heal, source, target)

    def _cut(self, fault: Fault) -> None:
        pair = self._pair(fault)
        if pair is not None:
            self._cut_for([pair, pair[::-1]], fault.lasts_s)

    def _cut_one_way(self, fault: Fault) -> None:
        pair = self._pair(fault)
        if pair is not None:
            self._cut_for([pair], fault.lasts_s)

    def _cut_home(self, fault: Fault) -> None:
        """Cut some hosts from the coordinator, but not from each other or from the rest."""
        hosts = [host for host in self._job.hosts() if host != "home"]
        dice = random.Random(fault.pick)
        some = dice.sample(hosts, dice.randint(1, len(hosts)))
        self._cut_for([p for o in some for p in (("home", o), (o, "home"))], fault.lasts_s)

    def _far(self, fault: Fault) -> None:
        """Let everything take long between two hosts."""
        pair = self._pair(fault)
        if pair is None:
            return
        self._world.say("network", "{} and {} are far from each other", *pair)
        for link in (self._job.network.link(*pair), self._job.network.link(*pair[::-1])):
            usual, link.delay_s = link.delay_s, (0.0, 0.3)
            self._world.after(fault.lasts_s, setattr, link, "delay_s", usual)

    def _isolate(self, fault: Fault) -> None:
        one = _choose(self._job.hosts(), fault.pick)
        others = [host for host in self._job.hosts() if host != one]
        if one is not None:
            self._cut_for([p for o in others for p in ((one, o), (o, one))], fault.lasts_s)

    def _split(self, fault: Fault) -> None:
        hosts = self._job.hosts()
        dice = random.Random(fault.pick)
        side = set(dice.sample(hosts, dice.randint(1, max(1, len(hosts) - 1))))
        across = [(a, b) for a in hosts for b in hosts if (a in side) != (b in side)]
        self._cut_for(across, fault.lasts_s)

    def _swizzle(self, fault: Fault) -> None:
        """Cut links one by one, and heal them in another order."""
        hosts = self._job.hosts()
        dice = random.Random(fault.pick)
        pairs = [(a, b) for a in hosts for b in hosts if a != b]
        pairs = dice.sample(pairs, dice.randint(1, len(pairs)) if pairs else 0)
        for pair in pairs:
            start_s = dice.uniform(0.0, fault.lasts_s / 2)
            stop_s = dice.uniform(fault.lasts_s / 2, fault.lasts_s)
            self._world.after(start_s, self._job.network.cut, *pair)
            self._world.after(stop_s, self._job.network.heal, *pair)

    def _drop(self, fault: Fault) -> None:
        end = _choose(list(self._job.network.connections()), fault.pick)
        if end is not None:
            self._job.network.drop(end)


def _choose(some: Sequence[T], pick: float) -> T | None:
    return some[int(pick * len(some))] if some else None
