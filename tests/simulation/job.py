"""A job in a simulated world: what is drawn about it, who is in it, and how it goes from start to
end.

    until `heal_s`     faults and wishes happen
    until `end_s`      nothing goes wrong any more: by then the job must be whole again, or over

A job that is whole has every worker and server that it wants, every partition has all its copies,
all members work in the newest generation, and the workers get on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.control.membership.policy import Policy
from paceline.control.membership.roster import Roster
from paceline.control.membership.state import Reservation
from paceline.ps.client.failover import PendingRequests
from paceline.ps.replication.chain import Role
from paceline.ps.replication.replication import Replica
from paceline.runtime.elastic.recovery_plan import plan_recovery
from simulation.coordinator import SimCoordinator
from simulation.faults import NOTICE, Fault, Nemesis, draw, draw_notices
from simulation.invariants import Oracle
from simulation.launcher import Launcher
from simulation.lockstep import LockstepWorker
from simulation.member import SimMember
from simulation.network import Network
from simulation.server import SimServer
from simulation.unit_worker import UnitWorker
from simulation.worker import SimWorker
from simulation.world import World

LIVENESS_S = 30.0  # of virtual time, after the last fault
PROGRESS = 3  # additions that every worker must make once the job is whole


@dataclass(frozen=True)
class Cores:
    """The production code that is simulated; mutants.py has broken ones."""

    roster: Any = Roster
    replica: Any = Replica
    books: Any = PendingRequests
    plan_recovery: Any = plan_recovery
    unit_worker: Any = UnitWorker
    announces_first: bool = False
    accuses_once: bool = False
    applies_again_alone: bool = False  # takes a request that is sent again for a new one


PRODUCTION = Cores()


@dataclass(frozen=True)
class Plan:
    """Everything that is drawn about a job before it starts."""

    seed: int
    policy: Policy
    mode: str
    hosts: tuple[str, ...]  # of the ranks, in turn
    reconnects: bool
    heal_s: float
    faults: Sequence[Fault] = field(default=())

    def without(self, fault: Fault) -> Plan:
        return replace(self, faults=[one for one in self.faults if one is not fault])


def plan(seed: int) -> Plan:
    """Draw a job; one in ten is about fencing, one in ten about workers without servers, one in ten
    about units of them, and one in ten about hosts that go away after a notice."""
    dice = World(seed).stream("plan")
    if seed % 10 == 1:
        return _draw_notices(seed, dice)
    if seed % 10 == 7:
        return _draw_units(seed, dice)
    if seed % 5 == 4:
        return _draw_fencing(seed, dice) if seed % 10 == 9 else _draw_lockstep(seed, dice)
    return _draw_any(seed, dice)


def _draw_lockstep(seed: int, dice: random.Random) -> Plan:
    """Workers that train together, without servers."""
    num_workers = dice.choice([2, 3, 4, 5])
    is_spread = dice.random() < 0.6
    heal_s = dice.uniform(6.0, 15.0)
    faults = draw(dice, heal_s, num=dice.choice([1, 2, 3, 4, 6]), has_network=is_spread)
    return Plan(
        seed=seed,
        policy=Policy(
            num_workers=num_workers,
            is_elastic=True,
            max_workers=num_workers + 2,
            on_loss=dice.choice(["shrink", "replace"]),
            reserve_s=8.0,
        ),
        mode="lockstep",
        hosts=("home", "host 1", "host 2", "host 3") if is_spread else ("home",),
        reconnects=False,
        heal_s=heal_s,
        faults=[_among_workers(fault) for fault in faults],
    )


def _draw_units(seed: int, dice: random.Random) -> Plan:
    """Workers of a mesh, of which some have a copy of the model between them."""
    size, num = dice.choice([2, 2, 3]), dice.choice([2, 3, 4])
    drawn = _draw_lockstep(seed, dice)
    policy = Policy(
        num_workers=size * num,
        is_elastic=True,
        min_workers=size,
        max_workers=size * (num + 1),
        on_loss=dice.choice(["shrink", "replace"]),
        reserve_s=8.0,
        mesh=f"dp={num},tp={size}",
    )
    return replace(drawn, policy=policy, mode="units")


def _among_workers(fault: Fault) -> Fault:
    kind = fault.kind.replace("server", "worker")
    return replace(fault, kind="scale" if kind in ("add worker", "remove worker") else kind)


def _draw_fencing(seed: int, dice: random.Random) -> Plan:
    """A primary and a worker are cut from the coordinator, but not from a backup.

    Whatever else is drawn, both are taken for lost after a while, and do not know it.
    """
    policy = Policy(
        num_workers=2,
        num_servers=dice.choice([2, 2, 3]),
        is_elastic=True,
        max_workers=4,
        max_servers=4,
        replicas=2,
        num_partitions=1,
        reserve_s=8.0,
    )
    heal_s = dice.uniform(8.0, 12.0)
    start_s = dice.uniform(1.0, 3.0)
    faults = draw(dice, heal_s, num=dice.choice([0, 0, 1, 2]), has_network=True)
    return Plan(
        seed=seed,
        policy=policy,
        mode=dice.choice(["async", "async", "ssp:3"]),
        hosts=("home", "host 1", "host 1", "host 2"),
        reconnects=dice.random() < 0.5,
        heal_s=heal_s,
        faults=[Fault(start_s, "cut home", 0.1, 0.0, heal_s - start_s), *faults],
    )


def _draw_notices(seed: int, dice: random.Random) -> Plan:
    """Hosts that go away after a notice; one half of the jobs has other faults as well."""
    base = dice.choice([_draw_any, _draw_lockstep, _draw_units])(seed, dice)
    heal_s = dice.uniform(12.0, 25.0)
    is_alone = dice.random() < 0.5
    # Long enough to leave, unless other faults keep the members from that.
    notices = draw_notices(dice, heal_s - 8.0, dice.choice([1, 2, 3]), 8.0)
    policy, hosts = base.policy, ("home", "host 1", "host 2", "host 3")
    faults = sorted([*notices, *([] if is_alone else base.faults)], key=lambda fault: fault.at_s)
    return replace(base, policy=policy, hosts=hosts, heal_s=heal_s, faults=faults)


def plan_of_notices(seed: int, until_s: float, num: int) -> Plan:
    """Draw a long job whose hosts go away after notices while processes are killed, half of each.

    Between two of them there is time to be whole again: what is lost twice at once is lost.
    """
    dice = World(seed).stream("notices")
    faults, every_s = [], (until_s - 20.0) / num
    for number in range(num):
        at_s = 2.0 + every_s * (number + dice.uniform(0.0, 0.3))
        kind = dice.choice([NOTICE, dice.choice(["kill server", "kill worker"])])
        faults.append(Fault(at_s, kind, dice.random(), dice.random(), 8.0))
    policy = Policy(
        num_workers=4,
        num_servers=3,
        is_elastic=True,
        max_workers=6,
        max_servers=5,
        replicas=2,
        num_partitions=4,
        reserve_s=8.0,
    )
    hosts = ("home", "host 1", "host 2", "host 3")
    return Plan(seed, policy, "sync", hosts, reconnects=False, heal_s=until_s, faults=faults)


def _draw_any(seed: int, dice: random.Random) -> Plan:
    num_servers = dice.choice([1, 2, 3, 3, 4, 4, 5])
    num_workers = dice.choice([1, 2, 2, 3, 4])
    policy = Policy(
        num_workers=num_workers,
        num_servers=num_servers,
        is_elastic=True,
        min_workers=1,
        max_workers=num_workers + 2,
        max_servers=num_servers + 2,
        on_loss=dice.choice(["shrink", "shrink", "replace"]),
        replicas=dice.choice([r for r in (1, 2, 2, 2, 3, 3) if r <= num_servers]),
        num_partitions=dice.choice([0, 1, 2, 3]),
        reserve_s=8.0,
    )
    is_spread = dice.random() < 0.6
    others = [f"host {n}" for n in range(1, dice.randint(2, 6))] if is_spread else []
    heal_s = dice.uniform(6.0, 15.0)
    num = dice.choice([0, 1, 2, 3, 3, 4, 5, 7])
    return Plan(
        seed=seed,
        policy=policy,
        mode=dice.choice(["sync", "async", "ssp:0", "ssp:1", "ssp:3"]),
        hosts=("home", *others),
        reconnects=dice.random() < 0.5,
        heal_s=heal_s,
        faults=draw(dice, heal_s, num=num, has_network=is_spread),
    )


class SimJob:
    """Everything of one simulated job."""

    def __init__(self, plan: Plan, cores: Cores = PRODUCTION) -> None:
        self.plan, self.policy, self.mode = plan, plan.policy, plan.mode
        self.reconnects = plan.reconnects
        self.world = World(plan.seed)
        self.network = Network(self.world)
        self.oracle = Oracle(self)
        self.cores = cores
        self.coordinator = SimCoordinator(
            self.world, self.network, self.policy, self.oracle, cores.roster
        )
        self.coordinator.announces_first = cores.announces_first
        self.by_rank: dict[int, SimMember] = {}
        self.leaving_hosts: set[str] = set()
        self._dice = self.world.stream("job")
        self.launcher = Launcher(self)
        self.is_whole_since: float | None = None

    def make_member(self, place: Reservation, *, is_newcomer: bool) -> SimMember:
        make: type[SimMember] = SimWorker if place.role == "worker" else SimServer
        in_lockstep = {"lockstep": LockstepWorker, "units": self.cores.unit_worker}
        make = in_lockstep.get(self.mode, make)
        host = self.plan.hosts[place.rank % len(self.plan.hosts)]
        if is_newcomer:
            staying = [one for one in self.plan.hosts if one not in self.leaving_hosts]
            host = self._dice.choice(staying or self.plan.hosts)
        member = make(self, place, host, is_newcomer=is_newcomer)
        self.by_rank[place.rank] = member
        return member

    def living(self) -> list[SimMember]:
        return [member for member in self.by_rank.values() if member.is_alive]

    def hosts(self) -> list[str]:
        return list(dict.fromkeys(self.plan.hosts))

    # -- from start to end --------------------------------------------------------------------

    def run(self) -> None:
        """Let it all happen; Violation says what must not have."""
        self.launcher.start()
        Nemesis(self, self.plan.faults)
        self.world.run(self.plan.heal_s, self._is_over)
        self._heal()
        self.world.run(self.plan.heal_s + LIVENESS_S, self._is_done)
        self.world.run(self.world.now_s + 0.5, self._is_over)
        if not self.oracle.end_of_job:
            missing = self.what_is_missing()
            self.oracle.require(
                not missing, "{} s after the last fault {}", LIVENESS_S, "; ".join(missing)
            )
            self.oracle.check_counts()
            if all(fault.is_notice for fault in self.plan.faults):
                self._require_no_loss()
            if self.mode in ("lockstep", "units"):
                self.oracle.check_logs()
            else:
                self._finish()
        self.oracle.check_history()

    def _require_no_loss(self) -> None:
        """Hosts went away after a notice, and nothing else happened: nobody is lost."""
        for what in ("workers lost", "servers lost", "processes lost at a deadline"):
            self.oracle.require(not self.oracle.counted[what], "{} after a notice", what)

    def _finish(self) -> None:
        """Let the workers end one after the other, as when the work is done; one is killed then.

        Nobody is missed any more.
        """
        self.world.say("--", "the work is done")
        before = dict(self.by_rank)
        first, *others = [member for member in self.living() if member.role == "worker"]
        first.leave(is_finished=True)
        for worker in others:
            self.world.after(self._dice.uniform(0.05, 1.0), worker.finish)
        if others:
            self.world.after(0.3, others[-1].crash)
        self.world.run(self.world.now_s + 3.0)
        self.oracle.require(self.by_rank == before, "somebody was started after the end")
        self.oracle.require(not self.oracle.end_of_job, "{}", self.oracle.end_of_job)

    def _heal(self) -> None:
        self.world.say("--", "from here on nothing goes wrong")
        self.coordinator.tear_at = None
        for source in self.hosts():
            for target in self.hosts():
                if source != target:
                    self.network.heal(source, target)
        for process in [*self.living(), self.coordinator]:
            process.resume()
            process.lag_s = 0.0
        self._before = {}

    def _is_over(self) -> bool:
        return bool(self.oracle.end_of_job)

    def _is_done(self) -> bool:
        if self._is_over():
            return True
        if self.world.num_events % 50:
            return False
        return not self.what_is_missing()

    def what_is_missing(self) -> list[str]:
        """Say what keeps the job from being whole."""
        if not self.coordinator.is_alive or self.coordinator.roster.membership is None:
            return ["there is no coordinator, or no membership"]
        roster = self.coordinator.roster
        now = roster.state.membership
        missing = [f"{w.role} {w.number} is wanted" for w in roster.wanted]
        missing += [f"{p.role} {p.number} is on its way" for p in roster.state.reserved]
        missing += [f"rank {one.rank} is to leave as planned" for one in roster.state.leaving]
        missing += [f"rank {rank} was to leave" for rank in self.coordinator.unwanted]
        for rank in now.ranks:
            member = self.by_rank[rank]
            if not member.is_alive:
                missing.append(f"{member.name} is a member, but dead")
            elif member.adopted < now.generation:
                missing.append(f"{member.name} works in generation {member.adopted}")
        servers = len(now.servers)
        for partition, holders in enumerate(now.partitions):
            if len(holders) != min(self.policy.replicas, servers) or now.filling[partition]:
                missing.append(f"partition {partition} is held by {holders}")
            missing += self._not_following(partition, holders)
        return missing or self._no_progress(now.workers)

    def _not_following(self, partition: int, holders: Sequence[int]) -> list[str]:
        found = []
        for place, holder in enumerate(holders):
            role = self.by_rank[holder].copies[partition].replica.role  # type: ignore[attr-defined]
            if role is not (Role.BACKUP if place else Role.PRIMARY):
                found.append(f"rank {holder} is {role.value} of partition {partition}")
        return found

    def _no_progress(self, workers: Sequence[int]) -> list[str]:
        """Once all else is well, every worker must still get on."""
        for rank in workers:
            self._before.setdefault(rank, self.by_rank[rank].additions)  # type: ignore[attr-defined]
        return [
            f"{self.by_rank[rank].name} does not get on"
            for rank in workers
            if self.by_rank[rank].additions < self._before[rank] + PROGRESS  # type: ignore[attr-defined]
        ]
