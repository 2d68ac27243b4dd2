"""Placement groups: the room that Ray has found for the processes of a job, by node.

    servers       one group, spread over the nodes, so that copies of a value are on different ones
    workers       one group, packed or spread
    one of each   a group of one bundle for each further process: while it waits, it is what the
                  autoscaler of a cluster sees; removed, it gives the room back

A bundle is the room of one process. If a node dies, Ray finds other room for its bundles, on a node
that has it or on one that joins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import LaunchError
from paceline.launcher.engines.ray.messages import Acquire, Room

_NOTICE_S = 3.0  # after so long without room a line says what is missing
_TICK_S = 0.2
_WORKERS, _SERVERS = "workers", "servers"


@dataclass
class Group:
    """A placement group of Ray; those of one bundle can be given back."""

    role: str
    group: Any
    count: int
    is_single: bool = False

    def bundles(self) -> dict[int, str]:
        """Return the node of each bundle that has one."""
        from ray.util import placement_group_table

        table = placement_group_table(self.group)
        if table.get("state") not in ("CREATED", "RESCHEDULING"):
            return {}
        return {index: node for index, node in table["bundles_to_node_id"].items() if node}


class Placements:
    """The placement groups of one job."""

    def __init__(self, ray: Any, asked: Acquire, say: Callable[[str], None]) -> None:
        self._ray, self._asked, self._say = ray, asked, say
        self._groups: list[Group] = []
        self._hosts: dict[str, tuple[Any, int, Group]] = {}  # a bundle on each, for its agent

    # -- at the start --------------------------------------------------------------------------

    def acquire(self) -> dict[str, Room]:
        """Wait for room for all processes of the start; raises LaunchError after `wait_s`."""
        asked = self._asked
        if asked.servers:
            self._add(_SERVERS, asked.servers, "SPREAD")
        self._add(_WORKERS, asked.workers, asked.strategy.upper())
        begun_s, was_said = time.monotonic(), False
        for one in self._groups:
            while not one.group.wait(timeout_seconds=_TICK_S):
                waited_s = time.monotonic() - begun_s
                if waited_s > asked.wait_s:
                    raise LaunchError(f"{self._missing()}; waited {asked.wait_s:g} s (--wait)")
                if waited_s > min(_NOTICE_S, asked.wait_s / 2) and not was_said:
                    was_said = True
                    self._say(
                        f"{self._missing()}; waiting up to {asked.wait_s:g} s for nodes to join or"
                        " other jobs to end (--wait)"
                    )
        for _ in range(asked.more_workers):
            self._add(_WORKERS, 1, "PACK", is_single=True)
        return self.rooms()

    def _add(self, role: str, count: int, strategy: str, *, is_single: bool = False) -> None:
        from ray.util import placement_group

        bundles = [dict(self._asked.resources) for _ in range(count)]
        name = f"paceline-{self._asked.job_id}-{role}"
        made = placement_group(bundles, strategy=strategy, name="" if is_single else name)
        self._groups.append(Group(role, made, count, is_single))

    def _missing(self) -> str:
        """Return which resources the job needs, and which the cluster has."""
        asked = self._asked
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        whole, free = self._ray.cluster_resources(), self._ray.available_resources()
        count = asked.workers + asked.servers
        needs, has = [], []
        for name, amount in asked.resources.items():
            needs.append(f"{name}={amount * count:g}")
            most = max((node["Resources"].get(name, 0.0) for node in nodes), default=0.0)
            has.append(
                f"{name}={whole.get(name, 0.0):g} ({free.get(name, 0.0):g} free, at most {most:g}"
                " on one node)"
            )
        each = ", ".join(f"{name}={amount:g}" for name, amount in asked.resources.items())
        what = _counted(asked.workers, "worker")
        what += f" and {_counted(asked.servers, 'server')}" if asked.servers else ""
        return (
            f"Ray has no room for {what} with {each} each: they need {', '.join(needs)}, the"
            f" cluster of {_counted(len(nodes), 'node')} has {', '.join(has)}"
        )

    # -- while the job runs ----------------------------------------------------------------------

    def rooms(self) -> dict[str, Room]:
        """Return the nodes with room for processes of the job, by address."""
        address = self._addresses()
        count: Counter[tuple[str, str]] = Counter()
        self._hosts = {}
        for group in sorted(self._groups, key=lambda one: one.is_single):
            for index, node in group.bundles().items():
                if node in address:
                    count[address[node], group.role] += 1
                    self._hosts.setdefault(address[node], (group.group, index, group))
        return {
            host: Room(host, count[host, _WORKERS], count[host, _SERVERS]) for host in self._hosts
        }

    def draining(self) -> dict[str, float | None]:
        """Return how long the nodes have that Ray drains, by address; None: no one knows."""
        from ray._private.state import state  # there is no public function for it

        address, found = self._addresses(), dict[str, float | None]()
        for node, at_ms in state.get_draining_nodes().items():
            if node in address:
                left_s = at_ms / 1000 - time.time()
                found[address[node]] = max(0.0, left_s) if at_ms else None
        return found

    def _addresses(self) -> dict[str, str]:
        """Return the addresses of the nodes that live, by Ray's name for them."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}

    def strategy(self, host: str) -> Any:
        """Return what places an actor on a node; raises LaunchError without room there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if host not in self._hosts:
            raise LaunchError(
                f"Ray has no room for this job on {host}; it chooses the nodes, and `paceline"
                " scale` asks for more room"
            )
        group, index, _ = self._hosts[host]
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)

    def want(self, workers: int, servers: int, busy: Mapping[str, int]) -> None:
        """Have room for so many processes: ask for more, or give back what no worker uses."""
        for role, count in ((_WORKERS, workers), (_SERVERS, servers)):
            have = sum(group.count for group in self._groups if group.role == role)
            for _ in range(count - have):
                self._add(role, 1, "PACK" if role == _WORKERS else "SPREAD", is_single=True)
            self._give_back(role, have - count, busy)

    def _give_back(self, role: str, surplus: int, busy: Mapping[str, int]) -> None:
        """Remove groups of one bundle: first those that wait, then those that no worker uses."""
        from ray.util import remove_placement_group

        address, rooms = self._addresses(), self.rooms()
        bundles = {host: room.workers + room.servers for host, room in rooms.items()}
        free = {host: room.workers - busy.get(host, 0) for host, room in rooms.items()}
        singles = [one for one in self._groups if one.is_single and one.role == role]
        where = {id(one): [address.get(n, "") for n in one.bundles().values()] for one in singles}
        has_agent = {id(group) for _, _, group in self._hosts.values()}
        for group in sorted(singles, key=lambda one: (len(where[id(one)]), id(one) in has_agent)):
            host = next(iter(where[id(group)]), None)
            if surplus <= 0:
                return
            if host is not None:
                if role == _WORKERS and free.get(host, 0) <= 0:
                    continue
                if id(group) in has_agent and bundles.get(host, 0) > 1:
                    continue  # Ray would end the agent, which the other bundles need
                free[host], bundles[host] = free.get(host, 0) - 1, bundles.get(host, 0) - 1
            remove_placement_group(group.group)
            self._groups.remove(group)
            surplus -= 1


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
