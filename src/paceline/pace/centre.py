"""The centre of a method on parameter servers: what the workers otherwise keep a copy each of.

A method that averages parameters has a point w that stands for all workers, and moves it by the
mean of what the workers found. With servers a bucket has a PLACE there, a table of its own, so that
buckets can be moved one by one. A worker pushes w - x_i, as if that were a gradient; the servers
average it, and torch's own SGD with the outer settings makes the step:

    outer steps         SGD(lr=outer_lr, momentum, nesterov) on the mean of w - x_i
    elastic averaging   SGD(lr=beta) on the mean of c - x_i
    the same, free      no optimizer: what a worker pushes is added when it comes

A method that votes (pace/bitmap/vote.py) has a place for many buckets, where nothing is kept
but the outcome of the last vote.

The first worker makes the tables and gives them its values, then the others take their seats. A
newcomer takes its seats when it is let in, and goes on at the clocks that a peer has told it; a
step that the peer has committed, but behind which not all have met yet, it repeats, and the servers
only answer (ps/server/table.py).

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

_MOMENTUM = "momentum_buffer"  # as torch's SGD calls it

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class Place:
    """One bucket's values on the servers, or the votes on several."""

    def __init__(self, table: RemoteTable) -> None:
        self.table = table
        self._ended: Work[Any] | None = None  # the commit of the step under way

    @property
    def values(self) -> torch.Tensor:
        """The centre, as this worker last read it."""
        return self.table.items[0].params

    @property
    def outbox(self) -> torch.Tensor:
        """What this worker pushes; it stays as it is until the next push."""
        return self.table.items[0].grads

    @property
    def is_committed(self) -> bool:
        """Whether the step under way is committed: then it must not be pushed again."""
        return self._ended is not None

    def push(self, own: torch.Tensor, gain: float = 1.0) -> Work[Any]:
        """Hand over how far the centre is from this worker's own values, `gain` times."""
        torch.sub(self.values, own, out=self.outbox)
        if gain != 1.0:
            self.outbox.mul_(gain)
        return self.table.push(0)

    def commit(self, settings: Mapping[str, Any] | None) -> Work[Any]:
        """End the step, once, however often it is called; fresh values are in `values` then."""
        if self._ended is None:
            self._ended = self.table.commit(None if settings is None else [dict(settings)])
        return self._ended

    def conclude(self) -> None:
        """Begin the next step: all workers have met behind this one."""
        self._ended = None

    def add(self, difference: torch.Tensor) -> None:
        """Have this added to the centre at once, where nobody waits; read what is there then."""
        if difference is not self.outbox:
            self.outbox.copy_(difference)
        self.table.push(0).wait()
        self.table.commit(None).wait()

    def pull(self) -> None:
        """Read the newest values. Blocks."""
        self.table.pull().wait()

    def assign(self) -> None:
        """Set the servers' values to those that this worker has as the centre. Blocks."""
        self.table.assign(0)

    def remembered(self) -> torch.Tensor:
        """Fetch the momentum that the servers' SGD has, as a flat tensor; zeros: none. Blocks."""
        flat = torch.zeros_like(self.values)
        for part, _, entries in state_wire.fetch(self.table):
            for entry in entries:
                if entry.key == _MOMENTUM and isinstance(entry.value, torch.Tensor):
                    values = entry.value.reshape(-1)
                    flat[part.start : part.start + values.numel()].copy_(values)
        return flat

    def remember(self, flat: torch.Tensor) -> None:
        """Let the servers' SGD have that momentum. Blocks."""
        state_wire.send(
            self.table,
            lambda part, spec: [
                StateEntry(0, _MOMENTUM, flat[part.start : part.start + spec.count].clone())
            ],
        )


class Centre:
    """The places of one method; made and extended by all workers together."""

    def __init__(self, job: Job, workers: Group, name: str, allocate: Allocate) -> None:
        self._job = job
        self._workers = workers
        self._name = name
        self._allocate = allocate
        self._places: list[Place] = []
        self._seats: list[Place] = []  # to be taken by a newcomer
        self._settled: list[int] = []  # by place: the last step that is behind all workers
        self._is_free = False

    def describe(self) -> str:
        """Say in a few words where it is."""
        count = len(self._job.fabric.membership.servers)
        what = "counted" if any(p.table.rule.votes for p in self._places) else "centre"
        return f"{what} on {count} server{'s' if count > 1 else ''}"

    def place(self, bucket: Bucket, *, is_free: bool = False) -> Place:
        """Bring a bucket to the servers. Collective.

        The settings of the outer SGD come with every commit. `is_free`: there is none; differences
        are added as they come, and nobody waits for anybody.
        """
        params, self._is_free = bucket.params, is_free
        values, outbox = (self._allocate(params.numel(), params.dtype) for _ in range(2))
        values.copy_(params)
        held = ItemParam(bucket.label, 0, 0, params.numel(), (params.numel(),))
        rule = Rule(bound=0, aggregate=True, all_speak=True)
        if is_free:
            rule = Rule(bound=None, push="delta")
        place = Place(
            RemoteTable(
                self._job.servers,
                self._job.fabric.membership.worker_numbers,
                f"{self._name}.{len(self._places)}",
                [Item(bucket.label, [held], outbox, values)],
                OptimizerSpec("SGD", (outer_settings(lr=1.0),)),
                rule,
            )
        )
        return self._add(place)

    def ballot_box(self, items: Sequence[Item], seed: int) -> Place:
        """Make a table that counts votes (pace/bitmap/vote.py). Collective."""
        table = RemoteTable(
            self._job.servers,
            self._job.fabric.membership.worker_numbers,
            f"{self._name}.{len(self._places)}",
            items,
            OptimizerSpec("SGD", (outer_settings(lr=1.0),)),
            Rule(bound=0, aggregate=True, push="delta", votes=True, seed=seed, all_speak=True),
        )
        return self._add(Place(table))

    def _add(self, place: Place) -> Place:
        self._places.append(place)
        if self._job.elastic.is_joining:
            self._seats.append(place)
        else:
            self._set_up(place)
        return place

    def _set_up(self, place: Place) -> None:
        table, is_first = place.table, self._workers.rank == 0
        if is_first:
            table.open()
            for number in range(len(table.items)):
                table.assign(number)
        self._workers.barrier()
        if not is_first:
            table.open()
        if self._is_free:
            place.pull()  # servers remember from which values each worker computes
        self._workers.barrier()

    def commit(self, places: Sequence[Place], settings: Mapping[str, Any]) -> None:
        """End a step of these places; fresh values are there then. Blocks."""
        Together([place.commit(settings) for place in places]).wait()

    def assign(self) -> None:
        """Let the servers begin with what this worker has as the centre: all workers have the same.
        Collective."""
        for place in self._places:
            place.assign()
        self._workers.barrier()  # nobody pushes before all have said so
        if self._is_free:
            for place in self._places:
                place.pull()
            self._workers.barrier()  # nobody gives before all have read

    # -- changes of the membership ------------------------------------------------------------

    def settled(self) -> list[int]:
        """Return by place how many steps are behind all workers."""
        return [place.table.clock - place.is_committed for place in self._places]

    def follow(self, settled: Sequence[int]) -> None:
        """Take over what a peer has told; what is behind all is not under way here any more."""
        self._settled = [int(clock) for clock in settled]
        for place, clock in zip(self._places, self._settled, strict=False):
            if clock >= place.table.clock:
                place.conclude()

    def resume(self, change: Change) -> None:
        """Take the seats of a newcomer; the servers have noticed who is gone by themselves."""
        for place in self._seats:
            place.table.open(self._job.fabric.membership.worker_numbers)
            if not place.table.rule.votes:
                place.pull()
        if not self._is_free:
            for place, clock in zip(self._places, self._settled, strict=False):
                if place in self._seats:
                    place.table.clock = clock
            if change.joined:
                self._workers.barrier()  # nobody begins a step before all have their seats
        self._seats.clear()


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
