"""Placement: which process of a job runs on which host.

Workers fill the hosts in order, slot by slot: `a:4,b:4` with six workers puts ranks 0 to 3 on a and
ranks 4 and 5 on b. The workers of a UNIT (runtime/mesh.py) stay on one host where the slots allow
it, because most of the communication is inside units. Servers take turns on the hosts that have
workers, or on those of --servers-on; a colocated server is on the host of its worker. Data workers
take turns on the hosts that have workers. Servers and data workers need no slot.

An ASSIGNMENT is a host and a local rank there. A process keeps its assignment until it ends. A
replacement takes that of its predecessor if the host is alive, else a free one on another host.

All of this is pure: a Placement never changes, and no host is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import ConfigError
from paceline.launcher.hosts.host_list import HostSlots, require_host
from paceline.runtime.process_names import ProcessName, names

Slot = tuple[int, int]  # ProcessName.slot: role and number, which a replacement inherits
_WORKER, _SERVER, _DATA = range(3)


@dataclass(frozen=True)
class Assignment:
    """A host, and the index of a process among those of its role there."""

    host: int
    local_rank: int


@dataclass(frozen=True)
class HostPlace:
    """What a process must know about its host; `local_world_size` counts workers."""

    host_index: int
    num_hosts: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Placement:
    """The hosts of a job in order, and the host of each process; a host is named by its index."""

    hosts: tuple[HostSlots, ...]
    assignments: Mapping[Slot, Assignment] = field(default_factory=dict)
    server_hosts: tuple[int, ...] = ()  # of --servers-on
    replicas: int = 1
    unit_size: int = 1
    avoided: Mapping[Slot, int] = field(default_factory=dict)  # a host that others cannot reach

    @classmethod
    def fill(
        cls,
        hosts: Sequence[HostSlots],
        num_workers: int,
        num_servers: int = 0,
        num_data_workers: int = 0,
        *,
        servers_on: Sequence[str] = (),
        colocated: bool = False,
        replicas: int = 1,
        unit_size: int = 1,
    ) -> Placement:
        """Place the first processes of a job; raises ConfigError if the hosts have too few slots.

        `replicas` is how many servers hold each value: they are to be on as many hosts.
        """
        hosts = tuple(hosts)
        require_slots(hosts, num_workers)
        require_host(servers_on, hosts, "--servers-on")
        workers = _fill_slots(hosts, num_workers, unit_size)
        busy = sorted(set(workers))
        if servers_on:
            server_hosts = [index for index, host in enumerate(hosts) if host.name in servers_on]
        else:
            server_hosts = busy if len(busy) >= replicas else list(range(len(hosts)))
        servers = workers if colocated else _in_turn(_with_room(hosts, server_hosts), num_servers)
        by_role = (workers, servers[:num_servers], _in_turn(busy, num_data_workers))
        return cls(
            hosts, _assign(by_role), tuple(server_hosts) if servers_on else (), replicas, unit_size
        )

    # -- where a process is -------------------------------------------------------------------

    def host_of(self, name: ProcessName) -> int:
        """Return the index of the host of a process; KeyError if it has no assignment."""
        return self.assignments[name.slot].host

    def place(self, name: ProcessName) -> HostPlace:
        """Return the place of a process on its host; KeyError if it has no assignment."""
        assignment = self.assignments[name.slot]
        # The assignments of lost workers count until others have replaced them.
        local_world_size = min(self.num_workers(assignment.host), self.hosts[assignment.host].slots)
        if name.is_worker:
            local_world_size = max(local_world_size, assignment.local_rank + 1)
        return HostPlace(assignment.host, len(self.hosts), assignment.local_rank, local_world_size)

    def num_workers(self, host: int) -> int:
        """Return how many workers run on a host."""
        return sum(
            slot[0] == _WORKER and assignment.host == host
            for slot, assignment in self.assignments.items()
        )

    def used_hosts(self) -> tuple[int, ...]:
        """Return the hosts that have a process."""
        return tuple(sorted({assignment.host for assignment in self.assignments.values()}))

    # -- changes while the job runs -----------------------------------------------------------

    def host_for_newcomer(
        self, name: ProcessName, living: Collection[int], running: Collection[Slot]
    ) -> int | None:
        """Return the host for a process that joins the running job; None if no slot is free.

        `living` are the hosts that can run a process, `running` the slots (`ProcessName.slot`) of
        the processes that run or start. A replacement returns to the host of its predecessor if
        that is alive. Else a worker goes to the host of its unit if that has a free slot, then to
        the one with most free slots; a server to the one with fewest servers. A host that it has
        to avoid is taken if no other has a free slot.
        """
        bad = self.avoided.get(name.slot)
        if bad in living:
            others = [host for host in living if host != bad]
            other = replace(self, avoided={}).host_for_newcomer(name, others, running)
            if other is not None:
                return other
        if not living:
            return None
        role = name.slot[0]
        before = self.assignments.get(name.slot)
        count = Counter(
            self.assignments[slot].host
            for slot in running
            if slot[0] == role and slot != name.slot and slot in self.assignments
        )
        if role == _SERVER:
            living = [host for host in living if self._has_room(host, count[host])]
        if role != _WORKER:
            if before is not None and before.host in living:
                return before.host
            chosen = [host for host in self.server_hosts if role == _SERVER and host in living]
            return min(chosen or living, key=lambda host: (count[host], host), default=None)
        free = {host: self.hosts[host].slots - count[host] for host in living}
        if before is not None and free.get(before.host, 0) > 0:
            return before.host
        unit = Counter(self._hosts_of_unit(name.number, running))
        best = max(free, key=lambda host: (free[host] > 0, unit[host], free[host], -host))
        return best if free[best] > 0 else None

    def with_newcomer(self, name: ProcessName, host: int, running: Collection[Slot]) -> Placement:
        """Return the placement with a newcomer on a host.

        It has the local rank of its predecessor, or the lowest that no running process has there.
        """
        before = self.assignments.get(name.slot)
        taken = {
            assignment.local_rank
            for slot, assignment in self.assignments.items()
            if slot[0] == name.slot[0] and assignment.host == host and slot in running
            if slot != name.slot
        }
        if before is not None and before.host == host and before.local_rank not in taken:
            return self
        assignment = Assignment(host, min(set(range(len(taken) + 1)) - taken))
        return replace(self, assignments={**self.assignments, name.slot: assignment})

    def avoiding_host_of(self, name: ProcessName) -> Placement:
        """Return the placement in which the next replacement of a process avoids its host."""
        if name.slot not in self.assignments:
            return self
        return replace(self, avoided={**self.avoided, name.slot: self.host_of(name)})

    def without(self, gone: Collection[Slot]) -> Placement:
        """Return the placement without processes that are not replaced: the job has shrunk."""
        return replace(
            self,
            assignments={
                s: assignment for s, assignment in self.assignments.items() if s not in gone
            },
        )

    def with_host(self, host: HostSlots) -> Placement:
        """Return the placement with another host at the end; raises ConfigError if it is known."""
        if any(host.name.lower() == other.name.lower() for other in self.hosts):
            raise ConfigError(
                f"host {host.name} is already in the job; `paceline status` lists its hosts"
            )
        return replace(self, hosts=(*self.hosts, host))

    def with_slots(self, index: int, host: HostSlots) -> Placement:
        """Return the placement with another number of slots on a host."""
        hosts = (*self.hosts[:index], host, *self.hosts[index + 1 :])
        return replace(self, hosts=hosts)

    def _has_room(self, host: int, num_servers: int) -> bool:
        slots = self.hosts[host].server_slots
        return slots is None or num_servers < slots

    def _hosts_of_unit(self, number: int, running: Collection[Slot]) -> Iterable[int]:
        first = number - number % self.unit_size
        for other in range(first, first + self.unit_size):
            slot = (_WORKER, other)
            if other != number and slot in running and slot in self.assignments:
                yield self.assignments[slot].host

    # -- for people ---------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """Return a line for each host: its processes and its slots."""
        lines = []
        for index, host in enumerate(self.hosts):
            here = names(
                ProcessName(0, number, is_server=role == _SERVER, is_data_worker=role == _DATA)
                for (role, number), assignment in sorted(self.assignments.items())
                if assignment.host == index
            )
            slots = f"{host.slots} slot{'s' if host.slots != 1 else ''}"
            lines.append(f"{host.name} ({slots}): {here or 'no process'}")
        return lines

    def notes(self) -> list[str]:
        """Return lines about replicas, and about units that do not fit on one host."""
        lines = []
        servers = {
            assignment.host for slot, assignment in self.assignments.items() if slot[0] == _SERVER
        }
        if self.replicas > 1 and len(servers) >= self.replicas:
            lines.append(f"replicas: the {self.replicas} copies of a value are on different hosts")
        elif self.replicas > 1:
            lines.append(
                f"replicas: the servers are on {_counted(len(servers), 'host')}, so the"
                f" {self.replicas} copies of a value share hosts; the loss of a host can lose"
                " values. Give more hosts"
            )
        split = self.split_units()
        if split:
            lines.append(
                f"mesh: {_counted(len(split), 'unit')} of {self.unit_size} workers"
                f" {'does' if len(split) == 1 else 'do'} not fit on one host and will be slower;"
                f" give slots in multiples of {self.unit_size}"
            )
        return lines

    def split_units(self) -> list[int]:
        """Return the units whose workers are on several hosts."""
        hosts: dict[int, set[int]] = {}
        for (role, number), assignment in self.assignments.items():
            if role == _WORKER:
                hosts.setdefault(number // self.unit_size, set()).add(assignment.host)
        return sorted(unit for unit, used in hosts.items() if len(used) > 1)


def num_slots(hosts: Iterable[HostSlots]) -> int:
    """Return the number of slots of all hosts."""
    return sum(host.slots for host in hosts)


def require_slots(hosts: Sequence[HostSlots], num_workers: int) -> None:
    """Refuse more workers than slots."""
    total = num_slots(hosts)
    if num_workers > total:
        raise ConfigError(
            f"-n {num_workers}: the hosts have {_counted(total, 'slot')}"
            f" ({', '.join(map(str, hosts))}); give -n {total}, or more slots"
        )


def _fill_slots(hosts: Sequence[HostSlots], num_workers: int, unit_size: int) -> list[int]:
    """Return the host of each worker: whole units first, then what is left, slot by slot."""
    free = [host.slots for host in hosts]
    workers: list[int] = []
    for host in range(len(hosts)):
        while free[host] >= unit_size and len(workers) + unit_size <= num_workers:
            workers += [host] * unit_size
            free[host] -= unit_size
    for host in range(len(hosts)):
        workers += [host] * min(free[host], num_workers - len(workers))
    return workers


def _with_room(hosts: Sequence[HostSlots], chosen: Sequence[int]) -> Sequence[int]:
    """Return the hosts for servers in turn; those with a number of places, so often as that."""
    if all(host.server_slots is None for host in hosts):
        return chosen
    slots = [host.server_slots or 0 for host in hosts]
    rounds = ([i for i, count in enumerate(slots) if count > k] for k in range(max(slots)))
    return [index for turn in rounds for index in turn] or chosen


def _in_turn(hosts: Sequence[int], count: int) -> list[int]:
    return [hosts[k % len(hosts)] for k in range(count)]


def _assign(by_role: Iterable[Sequence[int]]) -> dict[Slot, Assignment]:
    assignments: dict[Slot, Assignment] = {}
    for role, hosts in enumerate(by_role):
        count: Counter[int] = Counter()
        for number, host in enumerate(hosts):
            assignments[role, number] = Assignment(host, count[host])
            count[host] += 1
    return assignments


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
