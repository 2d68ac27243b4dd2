"""Mesh: how the workers of a job share out data and model.

    "dp=2,tp=2"        axes of a grid; their product is the number of workers
    dp                 copies of the model, each with batches of its own: takes any pace
    pp, fsdp, tp       parts of one copy: stages, shards, slices of matrices

The processes that hold one copy between them are a UNIT. Those with the same place in their units
hold the same part of the model: a COLUMN, over which gradients are averaged. Workers are numbered
through with tp fastest and dp slowest, so that a unit is a range of numbers, on one host if it can
be: it is the units that talk most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import UsageError

# Slowest first. What talks most has neighbouring numbers.
AXES = ("dp", "pp", "fsdp", "tp")
INNER = AXES[1:]


@dataclass(frozen=True)
class Mesh:
    """The size of each axis; 1: there is none."""

    dp: int = 1
    pp: int = 1
    fsdp: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read "dp=2,tp=2"; UsageError says what is wrong with it."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = (word.strip() for word in part.partition("="))
            if name not in AXES or not equals or not size.isascii() or not size.isdigit():
                raise UsageError(
                    f"mesh {text!r}: {part.strip()!r} is not an axis; write axes of"
                    f" {', '.join(AXES)} with their sizes, such as 'dp=2,tp=2'"
                )
            if name in sizes:
                raise UsageError(f"mesh {text!r}: {name} is there twice; give each axis one size")
            if int(size) < 1:
                raise UsageError(f"mesh {text!r}: {name}={size}; an axis has a size of at least 1")
            sizes[name] = int(size)
        if sizes.get("pp", 1) > 1 and sizes.get("fsdp", 1) > 1:
            raise UsageError(
                f"mesh {text!r}: pp and fsdp do not go together yet: stages hold parts of the"
                " parameters already; use pp with tp, or fsdp with tp"
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
        """How many processes hold one copy of the model between them."""
        return self.pp * self.fsdp * self.tp

    @property
    def num_workers(self) -> int:
        """How many workers it takes."""
        return self.dp * self.unit_size

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """The axes inside a unit that are there, slowest first."""
        return tuple((axis, self.size(axis)) for axis in INNER if self.size(axis) > 1)

    def require(self, num_workers: int, option: str = "mesh") -> None:
        """Refuse another number of workers than the product of the axes."""
        if num_workers == self.num_workers:
            return
        terms = " x ".join(f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1)
        raise UsageError(
            f"{option} {self}: {terms or 'dp 1'} = {self.num_workers}, but this job has"
            f" {num_workers} workers; start it with -n {self.num_workers}, or choose axes whose"
            f" product is {num_workers}"
        )

    def of_workers(self, num_workers: int) -> Mesh:
        """Return the mesh with as many copies as these workers hold: in an elastic job they come
        and go."""
        return replace(self, dp=num_workers // self.unit_size)

    # -- places -------------------------------------------------------------------------------

    def unit_of(self, number: int) -> int:
        """Return which copy of the model a worker has a part of: its index on dp."""
        return number // self.unit_size

    def place_of(self, number: int) -> int:
        """Return a worker's number within its unit: the column that it is in."""
        return number % self.unit_size

    def index(self, number: int, axis: str) -> int:
        """Return where a worker is on an axis."""
        inner = math.prod(self.size(a) for a in AXES[AXES.index(axis) + 1 :])
        return number // inner % self.size(axis)

    def unit(self, number: int) -> Sequence[int]:
        """Return the numbers of a worker's unit."""
        first = number - self.place_of(number)
        return range(first, first + self.unit_size)

    def column(self, number: int) -> Sequence[int]:
        """Return the numbers of those who hold the same part of the model."""
        return range(self.place_of(number), self.num_workers, self.unit_size)

    def data_index(self, number: int) -> int:
        """Return a worker's place among those who have batches of their own: the processes of `tp`
        and `pp` have the same."""
        return self.unit_of(number) * self.fsdp + self.index(number, "fsdp")

    def sharers(self, number: int) -> Sequence[int]:
        """Return the numbers of those who have batches of their own, one of them this worker."""
        step = self.tp
        first = number % step + self.index(number, "pp") * step * self.fsdp
        units = range(0, self.num_workers, self.unit_size)
        return [unit + first + shard * step for unit in units for shard in range(self.fsdp)]
