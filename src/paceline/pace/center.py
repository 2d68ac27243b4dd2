"""The center variable of an averaging method, on parameter servers instead of on each worker.

A method that averages parameters has a center variable w, and moves it by the mean of what the
workers found. With servers, each bucket has a table of its own there, so that buckets can be moved
one by one. A worker pushes w - x_i, as if that were a gradient; the servers average it, and torch's
own SGD with the outer settings makes the step:

    outer steps         SGD(lr=outer_lr, momentum, nesterov) on the mean of w - x_i
    elastic averaging   SGD(lr=beta) on the mean of c - x_i
    the same, free      no optimizer: what a worker pushes is added on arrival

A method that votes (pace/bitmap/vote.py) has one table for many buckets, which keeps only the
result of the last vote.

The first worker creates the tables with its values, then the others open them. A newcomer opens
them when it is admitted, and continues at the clocks that a peer sends. A step that the peer has
committed, but after which not all have agreed yet, it repeats, and the servers only reply
(ps/server/table.py).

Threads: none; the main thread calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.pace.exchange import Bucket
from paceline.ps import state_wire
from paceline.ps.client.items import Item, ItemParam
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.server.optimizer import StateEntry
from paceline.ps.spec import OptimizerSpec, Rule
from paceline.runtime.job import Job
from paceline.runtime.work import Together, Work
from paceline.state.protocol import Change

_MOMENTUM = "momentum_buffer"  # the name in torch's SGD

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class CentreTable:
    """The center values of one bucket on the servers, or the votes on several."""

    def __init__(self, table: RemoteTable) -> None:
        self.table = table
        self._ended: Work[Any] | None = None  # the commit of the current step

    @property
    def values(self) -> torch.Tensor:
        """The center values, as this worker last read them."""
        return self.table.items[0].params

    @property
    def outbox(self) -> torch.Tensor:
        """What this worker pushes; it does not change until the next push."""
        return self.table.items[0].grads

    @property
    def is_committed(self) -> bool:
        """Whether the current step is committed: then it must not be pushed again."""
        return self._ended is not None

    def push(self, own: torch.Tensor, gain: float = 1.0) -> Work[Any]:
        """Push the center values minus this worker's own, `gain` times."""
        torch.sub(self.values, own, out=self.outbox)
        if gain != 1.0:
            self.outbox.mul_(gain)
        return self.table.push(0)

    def commit(self, settings: Mapping[str, Any] | None) -> Work[Any]:
        """Commit the step, once, however often it is called; then `values` are fresh."""
        if self._ended is None:
            self._ended = self.table.commit(None if settings is None else [dict(settings)])
        return self._ended

    def begin_next_step(self) -> None:
        """Begin the next step: all workers have agreed after this one."""
        self._ended = None

    def add(self, difference: torch.Tensor) -> None:
        """Add this to the center values without waiting for other workers; read the result."""
        if difference is not self.outbox:
            self.outbox.copy_(difference)
        self.table.push(0).wait()
        self.table.commit(None).wait()

    def pull(self) -> None:
        """Read the newest values. Blocks."""
        self.table.pull().wait()

    def assign(self) -> None:
        """Set the servers' values to this worker's center values. Blocks."""
        self.table.assign(0)

    def fetch_momentum(self) -> torch.Tensor:
        """Return the momentum of the servers' SGD, as a flat tensor; zeros if none. Blocks."""
        flat = torch.zeros_like(self.values)
        for part, _, entries in state_wire.fetch(self.table):
            for entry in entries:
                if entry.key == _MOMENTUM and isinstance(entry.value, torch.Tensor):
                    values = entry.value.reshape(-1)
                    flat[part.start : part.start + values.numel()].copy_(values)
        return flat

    def send_momentum(self, flat: torch.Tensor) -> None:
        """Set the momentum of the servers' SGD. Blocks."""
        state_wire.send(
            self.table,
            lambda part, spec: [
                StateEntry(0, _MOMENTUM, flat[part.start : part.start + spec.count].clone())
            ],
        )


class Centre:
    """The tables of one method; created and extended by all workers together."""

    def __init__(self, job: Job, workers: Group, name: str, allocate: Allocate) -> None:
        self._job = job
        self._workers = workers
        self._name = name
        self._allocate = allocate
        self._tables: list[CentreTable] = []
        self._unopened: list[CentreTable] = []  # of a newcomer
        self._finished_steps: list[int] = []  # by table: the last step that all have finished
        self._is_free = False

    def describe(self) -> str:
        """Return where it is, for the line at the start."""
        count = len(self._job.fabric.membership.servers)
        what = "counted" if any(p.table.rule.votes for p in self._tables) else "centre"
        return f"{what} on {count} server{'s' if count > 1 else ''}"

    def add_bucket(self, bucket: Bucket, *, is_free: bool = False) -> CentreTable:
        """Put a bucket on the servers. Collective.

        The settings of the outer SGD are sent with every commit. `is_free`: there is no SGD;
        differences are added on arrival, and workers do not wait for each other.
        """
        params, self._is_free = bucket.params, is_free
        values, outbox = (self._allocate(params.numel(), params.dtype) for _ in range(2))
        values.copy_(params)
        held = ItemParam(bucket.label, 0, 0, params.numel(), (params.numel(),))
        rule = Rule(bound=0, aggregate=True, all_speak=True)
        if is_free:
            rule = Rule(bound=None, push="delta")
        remote = CentreTable(
            RemoteTable(
                self._job.servers,
                self._job.fabric.membership.worker_numbers,
                f"{self._name}.{len(self._tables)}",
                [Item(bucket.label, [held], outbox, values)],
                OptimizerSpec("SGD", (outer_settings(lr=1.0),)),
                rule,
            )
        )
        return self._add(remote)

    def add_vote_table(self, items: Sequence[Item], seed: int) -> CentreTable:
        """Create a table that counts votes (pace/bitmap/vote.py). Collective."""
        table = RemoteTable(
            self._job.servers,
            self._job.fabric.membership.worker_numbers,
            f"{self._name}.{len(self._tables)}",
            items,
            OptimizerSpec("SGD", (outer_settings(lr=1.0),)),
            Rule(bound=0, aggregate=True, push="delta", votes=True, seed=seed, all_speak=True),
        )
        return self._add(CentreTable(table))

    def _add(self, remote: CentreTable) -> CentreTable:
        self._tables.append(remote)
        if self._job.elastic.is_joining:
            self._unopened.append(remote)
        else:
            self._set_up(remote)
        return remote

    def _set_up(self, remote: CentreTable) -> None:
        table, is_first = remote.table, self._workers.rank == 0
        if is_first:
            table.open()
            for number in range(len(table.items)):
                table.assign(number)
        self._workers.barrier()
        if not is_first:
            table.open()
        if self._is_free:
            remote.pull()  # servers record from which values each worker computes
        self._workers.barrier()

    def commit(self, tables: Sequence[CentreTable], settings: Mapping[str, Any]) -> None:
        """Commit a step of these tables; then their values are fresh. Blocks."""
        Together([remote.commit(settings) for remote in tables]).wait()

    def assign(self) -> None:
        """Set the servers' values to this worker's center values, the same on all workers.
        Collective."""
        for remote in self._tables:
            remote.assign()
        self._workers.barrier()  # no worker pushes before all have assigned
        if self._is_free:
            for remote in self._tables:
                remote.pull()
            self._workers.barrier()  # no worker adds before all have read

    # -- changes of the membership ------------------------------------------------------------

    def finished_steps(self) -> list[int]:
        """Return by table how many steps all workers have finished."""
        return [remote.table.clock - remote.is_committed for remote in self._tables]

    def follow(self, finished_steps: Sequence[int]) -> None:
        """Follow the counts of a peer; end a step that all have finished."""
        self._finished_steps = [int(clock) for clock in finished_steps]
        for remote, clock in zip(self._tables, self._finished_steps, strict=False):
            if clock >= remote.table.clock:
                remote.begin_next_step()

    def resume(self, change: Change) -> None:
        """Open a newcomer's tables; the servers have noticed lost workers by themselves."""
        for remote in self._unopened:
            remote.table.open(self._job.fabric.membership.worker_numbers)
            if not remote.table.rule.votes:
                remote.pull()
        if not self._is_free:
            for remote, clock in zip(self._tables, self._finished_steps, strict=False):
                if remote in self._unopened:
                    remote.table.clock = clock
            if change.joined:
                self._workers.barrier()  # no worker begins a step before all tables are open
        self._unopened.clear()


def outer_settings(*, lr: float, momentum: float = 0.0, nesterov: bool = False) -> dict[str, Any]:
    """Return the settings of torch's SGD in their plain form.

    >>> outer_settings(lr=0.5)["momentum"]
    0.0
    """
    optimizer = torch.optim.SGD(
        [torch.zeros(1)], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0
    )
    group = optimizer.param_groups[0]
    return {name: value for name, value in group.items() if name != "params"}
