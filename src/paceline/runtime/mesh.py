"""Mesh: how data and model are divided among the workers of a job.

    "dp=2,tp=2"        axes of a grid; their product is the number of workers
    dp                 copies of the model, each with its own batches: takes any pace
    pp, fsdp, tp       parts of one copy: stages, shards, slices of matrices

The processes that hold one copy together are a UNIT. Processes with the same index in their units
hold the same part of the model: a DATA-PARALLEL GROUP, which averages gradients. Workers are
numbered with tp fastest and dp slowest, so that a unit is a range of numbers, on one host if
possible: most of the communication is inside units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import UsageError

# Slowest first. Workers that communicate most have neighbouring numbers.
AXES = ("dp", "pp", "fsdp", "tp")
INNER = AXES[1:]


@dataclass(frozen=True)
class Mesh:
    """The size of each axis; 1: the axis is not used."""

    dp: int = 1
    pp: int = 1
    fsdp: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse "dp=2,tp=2"; UsageError names the problem."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = (word.strip() for word in part.partition("="))
            if name not in AXES or not equals or not size.isascii() or not size.isdigit():
                raise UsageError(
                    f"mesh {text!r}: {part.strip()!r} is not an axis; write axes of"
                    f" {', '.join(AXES)} with their sizes, such as 'dp=2,tp=2'"
                )
            if name in sizes:
                raise UsageError(f"mesh {text!r}: {name} is given twice; give each axis one size")
            if int(size) < 1:
                raise UsageError(f"mesh {text!r}: {name}={size}; an axis has a size of at least 1")
            sizes[name] = int(size)
        if sizes.get("pp", 1) > 1 and sizes.get("fsdp", 1) > 1:
            raise UsageError(
                f"mesh {text!r}: pp and fsdp cannot be combined yet: stages already hold parts of"
                " the parameters; use pp with tp, or fsdp with tp"
            )
        return cls(**sizes)

    def __str__(self) -> str:
        named = [f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return ",".join(named) or "dp=1"

    def size(self, axis: str) -> int:
        """Return the size of an axis."""
        return int(getattr(self, axis))

    @property
    def unit_size(self) -> int:
        """Number of processes that hold one copy of the model together."""
        return self.pp * self.fsdp * self.tp

    @property
    def num_workers(self) -> int:
        """Number of workers of the mesh."""
        return self.dp * self.unit_size

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """The axes inside a unit that are used, slowest first."""
        return tuple((axis, self.size(axis)) for axis in INNER if self.size(axis) > 1)

    def require(self, num_workers: int, option: str = "mesh") -> None:
        """Raise UsageError unless `num_workers` is the product of the axes."""
        if num_workers == self.num_workers:
            return
        terms = " x ".join(f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1)
        raise UsageError(
            f"{option} {self}: {terms or 'dp 1'} = {self.num_workers}, but this job has"
            f" {num_workers} workers; start it with -n {self.num_workers}, or choose axes whose"
            f" product is {num_workers}"
        )

    def of_workers(self, num_workers: int) -> Mesh:
        """Return the mesh with as many copies as these workers hold: in an elastic job their number
        changes."""
        return replace(self, dp=num_workers // self.unit_size)

    # -- numbers of workers -------------------------------------------------------------------

    def unit_of(self, number: int) -> int:
        """Return the copy of the model of which a worker has a part: its index on dp."""
        return number // self.unit_size

    def unit_index(self, number: int) -> int:
        """Return a worker's index in its unit, which is also that of its data-parallel group."""
        return number % self.unit_size

    def index(self, number: int, axis: str) -> int:
        """Return a worker's index on an axis."""
        inner = math.prod(self.size(a) for a in AXES[AXES.index(axis) + 1 :])
        return number // inner % self.size(axis)

    def unit(self, number: int) -> Sequence[int]:
        """Return the numbers of a worker's unit."""
        first = number - self.unit_index(number)
        return range(first, first + self.unit_size)

    def data_parallel_numbers(self, number: int) -> Sequence[int]:
        """Return the numbers of the workers that hold the same part of the model."""
        return range(self.unit_index(number), self.num_workers, self.unit_size)

    def data_index(self, number: int) -> int:
        """Return a worker's index among the workers with different batches: the processes of `tp`
        and `pp` have the same batches."""
        return self.unit_of(number) * self.fsdp + self.index(number, "fsdp")

    def batch_numbers(self, number: int) -> Sequence[int]:
        """Return the numbers of workers with different batches, this worker among them."""
        step = self.tp
        first = number % step + self.index(number, "pp") * step * self.fsdp
        units = range(0, self.num_workers, self.unit_size)
        return [unit + first + shard * step for unit in units for shard in range(self.fsdp)]
