"""What the user who started the job decided about its members, as one value."""

from __future__ import annotations

import functools

import msgspec

from paceline.errors import ConfigError, RendezvousError, UsageError
from paceline.runtime.mesh import Mesh

ON_LOSS = ("shrink", "replace")


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How many members a job has, and what happens when one is lost.

    A job that is not elastic keeps its initial members; losses are only reported.
    """

    num_workers: int  # at the start
    num_servers: int = 0
    is_elastic: bool = False
    min_workers: int = 1  # fewer end the job, with on_loss "shrink"
    max_workers: int = 1024
    max_servers: int = 1024
    on_loss: str = "shrink"
    replicas: int = 1  # servers that hold each partition
    num_partitions: int = 0  # 0: as many as servers at the start
    mesh: str = ""  # "": each worker has a full copy of the model
    silent_s: float = 2.0  # without a heartbeat for this long: silent
    lease_s: float = 4.0  # silent or stopped for this long: lost
    stall_s: float = 30.0  # silent for this long although its process runs: lost
    absent_s: float = 10.0  # not reconnected this long after a restart of the coordinator: lost
    accused_s: float = 0.5  # a peer reports it as unreachable for this long: one of them is lost
    reserve_s: float = 120.0  # a reservation expires if no process has used it for this long

    def __post_init__(self) -> None:
        if self.on_loss not in ON_LOSS:
            raise ConfigError(f"on_loss {self.on_loss!r}: expected one of {', '.join(ON_LOSS)}")
        if not 1 <= self.min_workers <= self.num_workers <= self.max_workers:
            raise ConfigError(
                f"{self.num_workers} workers: expected at least --min {self.min_workers} (which is"
                f" at least 1) and at most --max {self.max_workers}"
            )
        for option, count in (("--min", self.min_workers), ("--max", self.max_workers)):
            if self.is_elastic:
                require_whole_units(self.mesh, option, count)
        if not 0 <= self.num_servers <= self.max_servers:
            raise ConfigError(
                f"{self.num_servers} servers: expected at most --max-servers {self.max_servers}"
            )
        if not 1 <= self.replicas <= max(1, self.num_servers):
            raise ConfigError(
                f"replicas {self.replicas} > servers {self.num_servers}: each copy of a partition"
                " needs a server of its own"
            )
        if self.silent_s <= 0 or self.lease_s <= 0:
            raise ConfigError(
                f"lease_s {self.lease_s} and silent_s {self.silent_s} must be above 0"
            )

    @property
    def partitions(self) -> int:
        """Number of partitions of the servers' tables; 0 without servers."""
        return (self.num_partitions or self.num_servers) if self.num_servers else 0

    @property
    def unit_size(self) -> int:
        """Number of workers that hold one copy of the model, and join and leave together."""
        return _parsed(self.mesh).unit_size

    def require_elastic(self, else_what: str) -> None:
        """Raise RendezvousError unless the job is elastic; `else_what`: what follows for it."""
        if not self.is_elastic:
            raise RendezvousError(
                f"this job is not elastic, {else_what}; start it with --min, --max or --on-loss"
            )

    @classmethod
    def fixed(cls, world_size: int, silent_s: float = 5.0) -> Policy:
        """Return the policy of a job that is not elastic, whatever the roles of its ranks."""
        return cls(num_workers=world_size, max_workers=world_size, silent_s=silent_s)


def require_whole_units(mesh: str, option: str, count: int) -> None:
    """Raise UsageError for a number of workers that would leave a copy of the model incomplete."""
    size = _parsed(mesh).unit_size
    units, rest = divmod(count, size)
    if rest:
        terms = " x ".join(f"{axis} {length}" for axis, length in _parsed(mesh).inner)
        raise UsageError(
            f"{option} {count}: with mesh {mesh} workers join and leave in units of {terms} ="
            f" {size}, and {count} = {units} x {size} + {rest}; give a multiple of {size}, such as"
            f" {option} {(units + 1) * size}"
        )


@functools.cache
def _parsed(mesh: str) -> Mesh:
    return Mesh.parse(mesh) if mesh else Mesh()
