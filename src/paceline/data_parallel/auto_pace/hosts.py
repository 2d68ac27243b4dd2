"""The hosts of a job's workers, from what the workers tell at a meeting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.control.member import Membership
from paceline.data_parallel.auto_pace.measurement import WorkerNote
from paceline.planner.automatic.policy import Servers
from paceline.planner.cluster import Cluster, Host


@dataclass(frozen=True)
class WorkerHosts:
    """The hosts of the workers, in the order of their first workers."""

    names: list[str]
    first_workers: list[int]  # ranks in the group
    placement: dict[str, int]
    cluster: Cluster
    servers: Servers
    most_on_machine: int
    free_bytes: float
    wire_rate: float  # of the host that sent most

    @classmethod
    def of(cls, notes: Sequence[WorkerNote], membership: Membership) -> WorkerHosts:
        """Return the hosts of these workers."""
        on_host: dict[str, list[int]] = {}
        for rank, note in enumerate(notes):
            on_host.setdefault(note.host, []).append(rank)
        names = _names(notes, on_host)
        machines = {machine: at for at, machine in enumerate(sorted({n.machine for n in notes}))}
        placement = {name: len(on_host[host]) for host, name in names.items()}
        hosts = tuple(
            Host(
                names[host],
                notes[ranks[0]].cores,
                0,  # memory is compared with what is free, not with all of it
                len(ranks),
                machine=machines[notes[ranks[0]].machine],
            )
            for host, ranks in on_host.items()
        )
        there = [membership.member(rank).host_id for rank in membership.servers]
        apart = {host for host in there if host not in on_host}
        servers = Servers(len(there), len(there) == len(notes) and not apart, len(apart))
        return cls(
            [names[host] for host in on_host],
            [ranks[0] for ranks in on_host.values()],
            placement,
            Cluster(hosts, server_hosts=len(apart)),
            servers,
            max(sum(n.machine == machine for n in notes) for machine in machines),
            min(notes[ranks[0]].free_bytes for ranks in on_host.values()),
            max(
                sum(notes[rank].wire_bytes / max(notes[rank].elapsed_s, 1e-9) for rank in ranks)
                for ranks in on_host.values()
            ),
        )


def _names(notes: Sequence[WorkerNote], on_host: dict[str, list[int]]) -> dict[str, str]:
    """Return a name for each host: the host's own, with a number if several have the same."""
    own = {host: notes[ranks[0]].name for host, ranks in on_host.items()}
    texts = list(own.values())
    return {
        host: name if texts.count(name) == 1 else f"{name}.{at}"
        for at, (host, name) in enumerate(own.items())
    }
