"""What a process holds of its job: groups, servers, steps, and its place on a mesh.

On a mesh parts of the system see the job as some of its workers do (`column`, `sharers`): a view is
a job too, with a world of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.comm.fabric import Fabric
from paceline.comm.group import Group
from paceline.control.client.rendezvous import Rendezvous
from paceline.errors import UsageError
from paceline.observe.telemetry.reporter import Reporter
from paceline.observe.telemetry.trace import tracer
from paceline.ps.client.link import ServerLink
from paceline.runtime.batch_weight import Contribution
from paceline.runtime.config import JobEnv
from paceline.runtime.elastic.session import Elastic
from paceline.runtime.mesh import Mesh
from paceline.runtime.preemption import Stopping

_ALL = 1 << 30  # more than there are workers


@dataclass(eq=False)
class Job:
    """Everything that this process holds of its job."""

    env: JobEnv
    rendezvous: Rendezvous
    fabric: Fabric
    world: Group
    reporter: Reporter
    elastic: Elastic
    servers: tuple[ServerLink, ...] = ()  # lines to the parameter servers
    contribution: Contribution = field(default_factory=Contribution)
    stopping: Stopping = field(default_factory=Stopping)
    carried: dict[str, Any] = field(default_factory=dict)  # the script's objects, by name
    closers: list[Callable[[], None]] = field(default_factory=list)  # called before it is left
    num_checkpoints: int = 0  # that the script has made, for their names
    mesh: Mesh | None = None  # how the workers share data and model; None: each has a whole model
    # On a mesh: of each of these notes, whether anybody has it who holds a part of the same model.
    ask_unit: Callable[[list[bool]], list[bool]] = lambda notes: notes
    has_shared_data: bool = False  # who gets which batches is settled: pl.shard, pl.data_rank
    mates: Fabric | None = None  # this process's unit, when it is known
    _views: dict[str, Job] = field(default_factory=dict)
    _whole: Job | None = None  # of a view: what it is a view of

    def worker_group(self, name: str) -> Group:
        """Form a group of all workers for one use; in an elastic job it follows their changes."""
        return worker_group(self.fabric, name, self.elastic.is_on)

    # -- meshes -------------------------------------------------------------------------------

    def use(self, mesh: Mesh) -> None:
        """Settle how the workers share data and model; the same for the whole life of the job."""
        if self.mesh == mesh:
            return
        if self.mesh is not None:
            raise UsageError(
                f"mesh {mesh}: this job has the mesh {self.mesh} already, and a job has one; give"
                " all models the same, or train them in jobs of their own"
            )
        mesh.require(self.env.world_size)
        if self.elastic.is_on and mesh.unit_size > 1:
            raise UsageError(
                f"mesh {mesh} in an elastic job: who is lost and replaced together must be known"
                f" from the start; start it with --mesh {mesh}"
            )
        if self.has_shared_data and mesh.unit_size > 1:
            raise UsageError(
                f"mesh {mesh}: pl.shard or pl.data_rank was called before pl.distribute(...,"
                " mesh=...), when every worker was to get batches of its own; call it afterwards,"
                f" or start the job with --mesh {mesh}"
            )
        self.mesh = mesh

    @property
    def column(self) -> Job:
        """The job as those see it who hold the same part of the model."""
        if self.mesh is None or self.mesh.unit_size == 1:
            return self
        return self._among(self.mesh.column(self.env.number), "column")

    @property
    def sharers(self) -> Job:
        """The job as those see it of whom each has batches of its own: one of every pipeline or
        tensor group."""
        if self.mesh is None or self.mesh.pp * self.mesh.tp == 1:
            return self
        if self.mesh.fsdp == 1:
            return self.column
        return self._among(self.mesh.sharers(self.env.number), "sharers")

    @property
    def whole(self) -> Job:
        """The job with all of its workers."""
        return self._whole or self

    def _among(self, numbers: Sequence[int], what: str) -> Job:
        if what not in self._views:
            seen = numbers
            if self.mesh is not None and what == "column":
                seen = open_column(self.mesh, self.env.number)
            fabric = self.fabric.data_parallel_view(seen, f"{what} {numbers[0]}")
            self._views[what] = replace(
                self,
                env=replace(self.env, world_size=len(numbers)),
                fabric=fabric,
                world=worker_group(fabric, "world", self.elastic.is_on),
                _whole=self.whole,
            )
        return self._views[what]

    @property
    def place(self) -> str:
        """What to add to a name that must not be the same for different parts of a model."""
        if self.mesh is None or self.mesh.unit_size == 1:
            return ""
        return f" part {self.mesh.place_of(self.env.number)}"

    @property
    def speaks(self) -> bool:
        """Whether this worker speaks for all: the first there is."""
        has_first_part = self.mesh is None or self.mesh.place_of(self.env.number) == 0
        return self.world.rank == 0 and has_first_part

    @property
    def counts_batches(self) -> bool:
        """Whether this worker speaks for its batches: on a mesh several get the same ones."""
        mesh, number = self.mesh, self.env.number
        return mesh is None or all(mesh.index(number, axis) == 0 for axis in ("pp", "tp"))

    @property
    def data_number(self) -> int:
        """This worker's number for what is drawn at random: on a mesh that of its batches."""
        return self.env.number if self.mesh is None else self.mesh.data_index(self.env.number)

    @property
    def unit(self) -> tuple[int, ...]:
        """The ranks of those who hold one copy of the model between them; without a mesh all."""
        return self.world.ranks if self.mesh is None else self.unit_fabric.membership.ranks

    @property
    def unit_fabric(self) -> Fabric:
        """The job as they see it, whoever else comes and goes: for groups among them."""
        if self.mesh is None:
            return self.fabric
        if self.mates is None:
            self.mates = mates_of(self.fabric, self.mesh, self.env.number)
        return self.mates

    @property
    def steps_done(self) -> int:
        """How many optimizer steps `distribute` has counted."""
        return self.reporter.steps_done

    def step_done(self, values: Mapping[str, float] | None = None, waited_s: float = 0.0) -> None:
        """Count an optimizer step, in which this worker waited so long for others to exchange
        gradients or parameters; `values` are shown beside the script's."""
        self.reporter.step_done(values or {}, waited_s=waited_s)
        if tracer.is_planned:
            tracer.step_done(self.reporter.steps_done)


def worker_group(fabric: Fabric, name: str, is_elastic: bool) -> Group:
    """Form a group of all workers; in an elastic job it follows their changes."""
    return fabric.worker_group(name) if is_elastic else Group(fabric, fabric.membership.workers)


def open_column(mesh: Mesh, number: int) -> range:
    """Return the numbers of a worker's column, those of units that may come later among them."""
    return range(mesh.place_of(number), _ALL, mesh.unit_size)


def mates_of(fabric: Fabric, mesh: Mesh, number: int) -> Fabric:
    """Find a worker's unit in the membership."""
    numbers, members = mesh.unit(number), fabric.membership.members
    return fabric.unit_view(
        [one for one in members if one.role == "worker" and one.number in numbers]
    )
