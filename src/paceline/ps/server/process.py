"""The process of a parameter server: one loop over everything that can arrive.

    wait -> messages of other servers -> requests of workers -> changes of the membership

One thread decides everything. It holds a copy of some partitions (ps/replication/partition.py), and
has a connection to each worker for every partition whose primary it is, and one to each other
server. The membership says which server holds which partition; in a job that is not elastic each
server holds one partition, and that never changes.

In an elastic job, helper threads form the connections (ps/replication/connector.py) and the control
thread delivers memberships; the loop takes both at its next turn. There a worker is lost when the
coordinator says so; otherwise also when its connection breaks. The loop ends when all workers have
left, or when this server is no member any more.

Threads: the loop's; `_on_changed` is called in the control thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from paceline.comm.fabric import Fabric
from paceline.control.client.agent import Agent
from paceline.control.client.local_agent import LocalAgent
from paceline.control.member import Membership
from paceline.control.messages import Changed, Presence
from paceline.errors import BadFrame, PacelineError
from paceline.observe.telemetry.events import Note
from paceline.observe.telemetry.trace import tracer
from paceline.ps.connection import Connection, form_connection
from paceline.ps.connection_id import has_called
from paceline.ps.replication import messages as p
from paceline.ps.replication.chain import Role
from paceline.ps.replication.connector import Connector
from paceline.ps.replication.partition import Departed, Partition
from paceline.ps.replication.peers import Peers, form_peer_connection
from paceline.ps.server.arrivals import Arrivals
from paceline.ps.server.server import Server
from paceline.ps.server.telemetry import Reports
from paceline.runtime.config import JobEnv

_TICK_S = 0.25  # how soon the end of a worker is noticed
_ELASTIC_TICK_S = 0.02  # how soon a change of the membership is noticed
_FORGET_S = 10.0  # how long the memory of lost workers is kept
_RETIRE_S = 30.0  # how long a worker that was asked to leave may take for its last step
_AGAIN_S = 0.2  # until the next attempt to form a connection


class ServerProcess:
    """A server process."""

    def __init__(self, fabric: Fabric, env: JobEnv, agent: Agent | LocalAgent) -> None:
        self.rank, self.number, self.on_loss = fabric.rank, env.number, env.on_loss
        self.is_elastic = env.is_elastic
        self.engine = fabric.engine
        self.arrivals = Arrivals(fabric.engine)
        self.partitions: dict[int, Partition] = {}
        self._fabric, self._agent = fabric, agent
        # In an elastic job: the coordinator decides on the members.
        self._control: Agent | None = None
        if env.is_elastic:
            assert isinstance(agent, Agent), "an elastic job has a coordinator"
            self._control = agent
        self._membership = fabric.membership
        self._peers = Peers(self._on_broken)
        self._forgettable: list[tuple[float, set[int]]] = []  # time, ranks
        self._connector: Connector[Connection] = Connector()
        # Keys of connections that are formed, or being formed.
        self._requested: set[Hashable] = set()
        self._retry: list[tuple[float, Hashable]] = []
        self._changes: deque[Changed] = deque()  # from the control thread
        self._presence: dict[int, Presence] = {}  # that partitions have handled
        self._retiring: dict[int, float] = {}  # workers in their last step, and until when
        self._leaving: set[int] = set()  # ranks that left with their unit, and end by themselves
        self._ranks: frozenset[int] = frozenset()  # of the membership; as the next, for speed
        self._workers: tuple[int, ...] = ()
        self._num_changes = 0  # that partitions have to handle
        self._adopted = 0  # the generation that was reported to the coordinator
        self._reports = Reports(self.rank, self.number, agent.report)

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until every worker has left or was lost."""
        if self._control is not None:
            self._control.on_changed = self._on_changed
        self._adopt(self._membership, ())
        self._see()
        while not self._is_over():
            self._wait()
            self._turn()
        self._send_reports()
        self._peers.close()

    def _wait(self) -> None:
        is_due = any(server.is_due for server in self._servers())
        self.arrivals.wait(list(self._peers.works()), 0.0 if is_due else self._tick_s())

    def _tick_s(self) -> float:
        if not self.is_elastic:
            return _TICK_S
        is_sending_snapshot = any(one.is_sending_snapshot for one in self.partitions.values())
        return _ELASTIC_TICK_S / 4 if is_sending_snapshot else _ELASTIC_TICK_S

    def _turn(self) -> None:
        for peer, message, tensors in self._peers.receive(self._is_due, self._find_landing):
            self._receive(peer, message, tensors)
        for partition in self.partitions.values():
            partition.acknowledge()
        for partition in self.partitions.values():
            partition.server.serve()
            if partition.server.broken:
                partition.drop_broken()
        self._reports.turned(self._servers())
        self._look_around()
        for partition in self.partitions.values():
            partition.flush()

    def _receive(self, peer: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        partition = self._partition(message.partition)
        was_open = partition.replica.is_open
        partition.receive(peer, message, tensors)
        if partition.replica.is_open and not was_open:
            # A worker that joined with the change that made this server the primary has to be
            # known before its requests are handled.
            partition.see(self._membership)

    def _is_due(self, message: p.AnyMessage) -> bool:
        """Return whether this server knows the generation of a message."""
        return message.generation <= self._membership.generation

    def _find_landing(self, message: p.AnyMessage) -> Sequence[torch.Tensor]:
        if isinstance(message, p.VisibleWorkers):
            return ()
        return self._partition(message.partition).find_peer_landing(message)

    def _is_over(self) -> bool:
        if self._control is None:
            return not any(server.connections for server in self._servers())
        if self._control.ending is not None:
            raise self._control.ending
        if self.rank not in self._ranks:
            return True
        departed = [self.departed(rank) for rank in self._workers]
        return all(one is not None and one.has_left for one in departed)

    def _look_around(self) -> None:
        now_s = time.monotonic()
        if self.is_elastic:
            self._adopt_changes()
            self._take_connections(now_s)
        self._see()
        if self.is_elastic:
            self._report_adopted()
            for rank, why in self._peers.unreachable(now_s, self._ranks):
                self._agent.report_unreachable(rank, why)
            self._forget(now_s)
        if self._reports.check(self._servers(), now_s):
            self._send_reports()
            tracer.flush()

    # -- membership ---------------------------------------------------------------------------

    def _see(self) -> None:
        """Let partitions handle changes of the membership, if there may be any."""
        for rank in [r for r, until_s in self._retiring.items() if time.monotonic() >= until_s]:
            del self._retiring[rank]
            self._num_changes += 1
        if self._fabric.presence != self._presence:
            self._presence = dict(self._fabric.presence)
            self._num_changes += 1
        for partition in self.partitions.values():
            state = (self._num_changes, partition.replica.is_open)
            if partition.seen != state:
                partition.seen = state
                partition.see(self._membership)

    def _on_changed(self, changed: Changed) -> None:
        self._changes.append(changed)

    def _adopt_changes(self) -> None:
        while self._changes:
            changed = self._changes.popleft()
            lost = tuple(loss.rank for loss in changed.lost)
            # A worker that left with its unit is not stopped: it exits by itself, and may log.
            self._leaving.update(loss.rank for loss in changed.lost if loss.kind.is_willing)
            if changed.membership.generation > self._membership.generation:
                self._adopt(changed.membership, lost)
        newest = self._agent.membership
        if newest is not None and newest.generation > self._membership.generation:
            gone = set(self._membership.ranks) - set(newest.ranks)
            self._adopt(newest, tuple(gone))  # announced when the coordinator was restarted

    def _adopt(self, membership: Membership, lost: Sequence[int]) -> None:
        if membership.generation > self._fabric.membership.generation:
            gone = set(self._fabric.membership.ranks) - set(membership.ranks)
            self._forgettable.append((time.monotonic() + _RETIRE_S + _FORGET_S, gone))
            vanished = [rank for rank in lost if rank not in self._leaving]
            self._fabric.enter_generation(membership, vanished, forgets=False)
        before, self._membership = self._membership, membership
        for rank in before.workers:
            if rank not in membership.ranks and rank not in lost:
                self._retiring[rank] = time.monotonic() + _RETIRE_S
        self._ranks, self._workers = frozenset(membership.ranks), membership.workers
        self._num_changes += 1
        for rank in self._peers:
            if rank not in self._ranks:
                self._peers.remove(rank)
                self._disconnect(rank)
        holders, filling = membership.holders, membership.filling
        for index in range(len(holders)):
            is_mine = self.rank in holders[index] or (filling and self.rank in filling[index])
            if is_mine or index in self.partitions:
                self._partition(index).adopt(membership)
                if before.primary_since(index) != membership.primary_since(index):
                    self._hang_up(index)
        self._connector.withdraw(lambda key: key[-1] not in self._ranks)  # type: ignore[index]
        self._form_connections()

    def _partition(self, index: int) -> Partition:
        if index not in self.partitions:
            if index not in range(known := len(self._membership.holders)):
                raise BadFrame(f"a message is about partition {index}, but there are {known}")
            made = self.partitions[index] = Partition(self, index)
            made.server.num_workers = len(self._membership.workers)
            for peer in self._peers:
                made.replica.connected(peer)
        return self.partitions[index]

    def _report_adopted(self) -> None:
        assert self._control is not None
        generation = self._membership.generation
        if generation > self._adopted and all(
            partition.replica.is_settled for partition in self.partitions.values()
        ):
            self._adopted = generation
            self._control.entered(generation)

    def _forget(self, now_s: float) -> None:
        """Drop the memory of lost workers, when no copy can be asked to read it any more."""
        while self._forgettable and self._forgettable[0][0] <= now_s:
            for rank in self._forgettable.pop(0)[1]:
                self._fabric.forget(rank)

    def departed(self, rank: int) -> Departed | None:
        presence = self._fabric.presence.get(rank)
        if presence is not None and presence.is_gone:
            return Departed(presence.text, has_left=presence.state == "left")
        is_here = rank in self._ranks or rank in self._retiring
        return None if is_here else Departed("it is not in the job any more")

    # -- connections --------------------------------------------------------------------------

    def _form_connections(self) -> None:
        membership = self._membership
        for index, partition in self.partitions.items():
            if membership.holders[index][:1] != (self.rank,):
                continue
            for rank in membership.workers:
                if self.is_elastic:
                    self._request_connection(
                        ("worker", index, membership.primary_since(index), rank)
                    )
                else:
                    pair = form_connection(self._fabric, membership, index, rank, self.rank)
                    partition.server.connect(pair, rank)
        if self.is_elastic:
            for rank in membership.servers:
                if rank != self.rank:
                    self._request_connection(("server", rank))
            for rank in membership.workers:
                if membership.member(rank).host_id == self._fabric.me.host_id:
                    self._request_connection(("link", rank))

    def _request_connection(self, key: tuple[Any, ...]) -> None:
        rank, membership = key[-1], self._membership
        if (
            key in self._requested
            or rank not in membership.ranks
            or self.departed(rank) is not None
        ):
            return
        self._requested.add(key)
        fabric, member = self._fabric, membership.member(rank)
        if key[0] == "link":  # not each worker links to each server of its host
            self._connector.arrange_when(
                rank, key, lambda: fabric.link(member), lambda: fabric.endpoint.can_link(member)
            )
        elif key[0] == "server":
            self._connector.arrange(
                rank, key, lambda: form_peer_connection(fabric, membership, rank)
            )
        else:
            ends = (fabric, membership, key[1], rank, self.rank)
            self._connector.arrange_when(
                rank, key, lambda: form_connection(*ends), lambda: has_called(*ends)
            )

    def _take_connections(self, now_s: float) -> None:
        for key, formed in self._connector.take():
            if isinstance(formed, PacelineError):
                self._retry.append((now_s + _AGAIN_S, key))
            else:
                self._take_connection(key, formed)
        due = [key for at_s, key in self._retry if at_s <= now_s]
        self._retry = [one for one in self._retry if one[0] > now_s]
        for key in due:
            self._requested.discard(key)
            self._request_connection(key)  # type: ignore[arg-type]

    def _take_connection(self, key: Any, pair: Connection | None) -> None:
        if pair is None:
            self._on_linked(key[1])
        elif key[-1] not in self._membership.ranks:
            pair.close()
        elif key[0] == "server":
            self._peers.add(key[1], pair)
            self._send_visible_workers([key[1]])
            for partition in self.partitions.values():
                partition.replica.connected(key[1])
        else:
            _, index, since, rank = key
            is_current = self._membership.primary_since(index) == since
            if is_current and self._membership.holders[index][:1] == (self.rank,):
                self.partitions[index].server.connect(pair, rank)
            else:
                pair.close()

    def _on_linked(self, rank: int) -> None:
        """Note that a worker's memory can be seen from now on."""
        for partition in self.partitions.values():
            caller = partition.server.callers.get(rank)
            if caller is not None:
                caller.is_here = True
        self._send_visible_workers(self._peers)

    def _send_visible_workers(self, peers: Iterable[int]) -> None:
        seen = tuple(rank for rank in self._workers if self._fabric.is_linked(rank))
        self._peers.send_visible_workers(peers, self._membership.generation, seen)

    def _hang_up(self, index: int) -> None:
        """Close the connections of a partition whose primary is new."""
        self._connector.withdraw(lambda key: key[:2] == ("worker", index))  # type: ignore[index]
        server = self.partitions[index].server
        for rank in list(server.connections):
            server.hang_up(rank)

    def _on_broken(self, peer: int, why: str) -> None:
        self.log(f"lost its connection to {self._peer_name(peer)}: {why}")
        self._disconnect(peer)

    def _peer_name(self, rank: int) -> str:
        if rank not in self._membership.ranks:
            return f"rank {rank}"
        return f"server {self._membership.member(rank).number} (rank {rank})"

    def _disconnect(self, peer: int) -> None:
        for partition in self.partitions.values():
            partition.replica.disconnected(peer)

    # -- the context of partitions -----------------------------------------------------------

    def is_here(self, rank: int) -> bool:
        return self._fabric.is_linked(rank)

    def sees(self, peer: int, rank: int) -> bool:
        return self._peers.sees(peer, rank)

    def post(self, peer: int, message: p.AnyMessage, tensors: Sequence[torch.Tensor]) -> None:
        self._peers.post(peer, message, tensors)

    def backlog(self, peer: int) -> int:
        return self._peers.backlog(peer)

    def report_in_sync(self, partition: int, generation: int) -> None:
        assert self._control is not None
        self._control.in_sync(partition, generation)

    def log(self, text: str) -> None:
        self._agent.report(Note(self.rank, f"server {self.number}: {text}"))

    def _servers(self) -> list[Server]:
        return [partition.server for partition in self.partitions.values()]

    def _send_reports(self) -> None:
        for partition in self.partitions.values():
            if partition.replica.role is Role.PRIMARY:
                for served in partition.server.tables:
                    self._agent.report(served.table.report())
