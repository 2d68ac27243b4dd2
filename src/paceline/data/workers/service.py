"""The loop of a data worker: it receives requests and sends batches.

    wait -> receive requests -> (a later stage: request samples) -> make one batch -> send it

One thread makes one batch at a time, in the order in which everything for it is available. Requests
wait here for their turn. Each client has a bounded number of them, so nothing piles up: a stage
makes only what the next one has requested.

The loop ends when all clients (the trainers, or the next stage) have left the job or were lost.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from paceline import _core
from paceline.comm.group import Group
from paceline.control.member import Member
from paceline.data.workers import messages as m
from paceline.data.workers.connection import ClientConnection, form
from paceline.data.workers.messages import pack, unpack
from paceline.data.workers.recipe import Recipe, SampleFailed, StreamEnded
from paceline.data.workers.worker_pool import DataWorkerPool, PendingBatch, ready_key
from paceline.errors import PeerError, UsageError
from paceline.ps.replication.connector import Connector
from paceline.runtime.console import say
from paceline.runtime.job import Job

_TICK_S = 0.1


def stage_members(job: Job, stage: int) -> list[Member]:
    """Return the data workers of a stage."""
    first = sum(job.env.data_workers[:stage])
    membership = job.fabric.membership
    ranks = membership.data_workers[first : first + job.env.data_workers[stage]]
    return [membership.member(rank) for rank in ranks]


def serve(job: Job, recipes: Sequence[Recipe]) -> NoReturn:
    """Run a data worker until the trainers have left; then exit cleanly."""
    Service(job, recipes).run()
    sys.exit(0)


class Service:
    """The loop of a data worker."""

    def __init__(self, job: Job, recipes: Sequence[Recipe]) -> None:
        self._job, self._recipes = job, recipes
        self._stage = _stage_of(job)
        self._num_stages = len(job.env.data_workers)
        self._pool: DataWorkerPool | None = None
        if self._stage > 0:
            agent, members = job.rendezvous.agent, stage_members(job, self._stage - 1)
            is_first = self._stage == 1
            self._pool = DataWorkerPool(job.fabric, agent, members, is_first_stage=is_first)
        self._connections: list[ClientConnection] = []
        self._meetings: Connector[Group] = Connector()
        self._connecting: dict[int, Member] = {}
        self._forwarded: list[tuple[ClientConnection, PendingBatch]] = []  # to the stage before
        # With the samples of the stage before, or None.
        self._ready: deque[tuple[ClientConnection, m.BatchRequest, Any]] = deque()
        for client in self._clients():
            self._connecting[client.rank] = client
            self._meetings.arrange(client.rank, client.rank, self._forming(client))
        job.rendezvous.agent.store_set(ready_key(job.env.rank), b"1")

    def run(self) -> None:
        """Serve until all clients have left."""
        _core.keep_freed_memory()  # batches have about the same size
        for recipe in self._recipes:
            recipe.begin(self._job.env.number, sum(self._job.env.data_workers))
        while not self._is_over():
            if not self._ready:
                self._wait()
            self._accept()
            for connection in list(self._connections):
                self._take_requests(connection)
            self._take_samples()
            if self._ready:
                self._make(*self._ready.popleft())

    def _clients(self) -> list[Member]:
        if self._stage + 1 < self._num_stages:
            return stage_members(self._job, self._stage + 1)
        membership = self._job.fabric.membership
        return [membership.member(rank) for rank in membership.workers]

    def _forming(self, client: Member) -> Callable[[], Group]:
        fabric = self._job.fabric
        return lambda: form(fabric, fabric.me, client)

    def _is_over(self) -> bool:
        presence = self._job.fabric.presence
        known = [presence.get(client.rank) for client in self._clients()]
        if all(one is not None and one.state in ("left", "lost") for one in known):
            return True
        agent = self._job.rendezvous.agent
        is_cut_off = not agent.is_attached
        return is_cut_off and not self._connections and not self._connecting

    def _wait(self) -> None:
        works = [connection.receiving for connection in self._connections]
        works += [p.incoming.work for _, p in self._forwarded if p.incoming is not None]
        if works:
            _core.wait_any([work.handle for work in works], _TICK_S)  # type: ignore[misc]
        else:
            time.sleep(_TICK_S / 5)

    def _accept(self) -> None:
        for rank, formed in self._meetings.take() if self._connecting else ():
            member = self._connecting.pop(rank)  # type: ignore[call-overload]
            # Else the client is gone, or has dropped this data worker.
            if isinstance(formed, Group):
                self._connections.append(ClientConnection(self._job.fabric, member, formed))

    def _take_requests(self, connection: ClientConnection) -> None:
        try:
            while connection.receiving.done():
                self._begin(connection, connection.take())
        except PeerError:
            self._drop(connection)

    def _begin(self, connection: ClientConnection, request: m.BatchRequest) -> None:
        if not 0 <= request.loader < len(self._recipes):
            connection.refuse(request, m.UNKNOWN, "")
        elif request.facts != (mine := self._recipes[request.loader].facts):
            connection.refuse(request, m.DIFFERS, mine)
        elif self._pool is None:
            self._ready.append((connection, request, None))
        else:
            self._forwarded.append((connection, self._pool.send(request)))

    def _take_samples(self) -> None:
        """Receive samples from the stage before."""
        if self._pool is None:
            return
        self._pool.poll()
        for entry in list(self._forwarded):
            received = self._pool.take(entry[1]) if entry[1].has_arrived else None
            if received is None:
                continue  # not yet, or sent to another data worker
            self._forwarded.remove(entry)
            connection, request = entry[0], entry[1].request
            if received.reply.problem:
                self._refuse(connection, request, received.reply.problem, received.reply.text)
            else:
                samples = unpack(received.reply.plain, received.memory)
                self._ready.append((connection, request, samples))
        if self._pool.is_empty:  # this process does the stages before as well
            self._ready.extend(
                (connection, pending.request, None) for connection, pending in self._forwarded
            )
            self._forwarded.clear()

    def _make(self, connection: ClientConnection, request: m.BatchRequest, samples: Any) -> None:
        recipe = self._recipes[request.loader]
        try:
            made = self._made(recipe, request, samples)
            packed = pack(made, "a batch" if self._is_last else "a sample, between two stages,")
        except StreamEnded:
            self._refuse(connection, request, m.ENDED, "")
            return
        except SampleFailed as failure:
            self._refuse(connection, request, m.RAISED, f"{self._name}: {failure}")
            return
        except UsageError as error:
            self._refuse(connection, request, m.RAISED, f"{self._name}: {error}")
            return
        try:
            connection.deliver(request, packed)
        except PeerError:
            self._drop(connection)

    def _made(self, recipe: Recipe, request: m.BatchRequest, samples: Any) -> Any:
        """Do the work of this stage, and of those before it unless it is done."""
        first = self._stage
        if samples is None:
            first, samples = 0, recipe.read(request)
        last = len(recipe.stages) if self._is_last else min(self._stage + 1, len(recipe.stages))
        for number in range(first, last):
            samples = recipe.apply(number, request, samples)
        return recipe.collate(request, samples) if self._is_last else samples

    @property
    def _is_last(self) -> bool:
        return self._stage + 1 == self._num_stages

    @property
    def _name(self) -> str:
        return f"data worker {self._job.env.number} ({self._job.fabric.me.where})"

    def _refuse(
        self, connection: ClientConnection, request: m.BatchRequest, problem: str, text: str
    ) -> None:
        try:
            connection.refuse(request, problem, text)
        except PeerError:
            self._drop(connection)

    def _drop(self, connection: ClientConnection) -> None:
        """Drop a client that is gone, and its requests."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._ready = deque(entry for entry in self._ready if entry[0] is not connection)
            self._forwarded = [entry for entry in self._forwarded if entry[0] is not connection]
            connection.close()


def _stage_of(job: Job) -> int:
    number, stage = job.env.number, 0
    while number >= job.env.data_workers[stage]:
        number -= job.env.data_workers[stage]
        stage += 1
    return stage


def log_serving(job: Job, recipes: Sequence[Recipe]) -> None:
    """Log once what the data workers do."""
    if job.env.number == 0:
        counts = " and then ".join(map(str, job.env.data_workers))
        loaders = "; ".join(recipe.facts for recipe in recipes)
        say(f"data workers ({counts}) make the batches of: {loaders}")
