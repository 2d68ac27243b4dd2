"""Tables of a small model in this process, and the model itself under plain torch.

The model has parameters of several shapes in two param groups. Its flat gradient is cut into shards
as a server would hold them: `whole` keeps parameters in one piece, `cut` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.ps.server.table import Table
from paceline.ps.spec import OptimizerSpec, Rule, ShardPiece, ShardSpec, TableSpec

SHAPES = {"first.weight": (24, 10), "first.bias": (24,), "second.weight": (7, 24), "scale": ()}
GROUPS = (0, 1, 0, 1)  # of each parameter
NUM_ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values())
WHOLE = ((0, 264), (264, NUM_ELEMENTS))  # at the borders of parameters
CUT = ((0, 80), (80, 272), (272, NUM_ELEMENTS))  # anywhere


class Clock:
    """Time that stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def shards(
    ranges: Sequence[tuple[int, int]] = WHOLE, dtype: str = "float32"
) -> tuple[ShardSpec, ...]:
    """Cut the model at these places."""
    return tuple(
        ShardSpec(f"part {number}", dtype, stop - start, tuple(_pieces(start, stop)))
        for number, (start, stop) in enumerate(ranges)
    )


def _pieces(start: int, stop: int) -> Sequence[ShardPiece]:
    pieces, place = [], 0
    for param, (name, shape) in enumerate(SHAPES.items()):
        count = torch.Size(shape).numel()
        begin, end = max(place, start), min(place + count, stop)
        if begin < end:
            whole = end - begin == count
            own = shape if whole else (end - begin,)
            pieces.append(ShardPiece(name, param, GROUPS[param], begin - start, end - begin, own))
        place += count
    return pieces


def table(
    rule: Rule,
    optimizer: str = "SGD",
    groups: Sequence[Mapping[str, Any]] = ({"lr": 0.1}, {"lr": 0.1}),
    *,
    workers: Sequence[int] = (0, 1),
    ranges: Sequence[tuple[int, int]] = WHOLE,
    dtype: str = "float32",
    now: Callable[[], float] | None = None,
) -> Table:
    """Make a table of the model, without values."""
    own = OptimizerSpec(optimizer, tuple(dict(group) for group in groups))
    spec = TableSpec("model", tuple(workers), shards(ranges, dtype), own, rule)
    return Table(spec, memory, now or Clock())


def matrix_table(
    rule: Rule, optimizer: str, groups: Sequence[Mapping[str, Any]], pieces: Sequence[ShardPiece]
) -> Table:
    """Make a table of whole matrices, each a shard of its own."""
    parts = tuple(
        ShardSpec(piece.name, "float32", piece.count, (msgspec.structs.replace(piece, start=0),))
        for piece in pieces
    )
    own = OptimizerSpec(optimizer, tuple(dict(group) for group in groups))
    return Table(TableSpec("model", (0, 1), parts, own, rule), memory, Clock())


def memory(_shard: int, _use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), float("nan"), dtype=dtype)


def noise(seed: int, *, scale: float = 1.0) -> torch.Tensor:
    """Return a flat gradient, or values, of the whole model."""
    return scale * torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed))


def assign(table: Table, flat: torch.Tensor) -> None:
    """Set all values."""
    for number, part in enumerate(parts(table, flat)):
        table.assign(number, part)


def push(
    table: Table, worker: int, grad: torch.Tensor, *, clock: int | None = None, absent: Any = ()
) -> None:
    """Push all shards."""
    clock = table.clocks.clock(worker) + 1 if clock is None else clock
    for number, part in enumerate(parts(table, grad)):
        table.push(worker, number, clock, part, absent)
    table.note_waits()


def commit(table: Table, worker: int, settings: Any = None) -> None:
    """End a worker's step."""
    table.commit(worker, table.clocks.clock(worker) + 1, settings)
    table.note_waits()


def step(table: Table, worker: int, grad: torch.Tensor, settings: Any = None) -> None:
    """Push everything, and commit."""
    push(table, worker, grad)
    commit(table, worker, settings)


def read(table: Table, worker: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Read all shards."""
    outs = [torch.empty(shard.count, dtype=dtype) for shard in table.spec.shards]
    for number, out in enumerate(outs):
        table.read(worker, number, out)
    table.note_waits()
    return torch.cat(outs)


def values(table: Table) -> torch.Tensor:
    """Return the values as the server keeps them."""
    return torch.cat([shard.params for shard in table.shards])


def parts(table: Table, flat: torch.Tensor) -> list[torch.Tensor]:
    """Cut a flat tensor as the table is cut."""
    return list(flat.split([shard.count for shard in table.spec.shards]))


class OneProcess:
    """The same model under plain torch."""

    def __init__(self, flat: torch.Tensor, optimizer: str, groups: Sequence[Mapping[str, Any]]):
        self.params = [
            torch.nn.Parameter(part.clone().view(shape))
            for part, shape in zip(_split(flat), SHAPES.values(), strict=True)
        ]
        own = [
            {
                **group,
                "params": [p for p, g in zip(self.params, GROUPS, strict=True) if g == number],
            }
            for number, group in enumerate(groups)
        ]
        self.optimizer = getattr(torch.optim, optimizer)(own)

    def step(self, grad: torch.Tensor, absent: Any = (), settings: Any = None) -> None:
        """Update with this gradient."""
        for group, new in zip(self.optimizer.param_groups, settings or ({}, {}), strict=True):
            group.update(new)
        for number, (param, part) in enumerate(zip(self.params, _split(grad), strict=True)):
            param.grad = None if number in absent else part.clone().view(param.shape)
        self.optimizer.step()

    @property
    def flat(self) -> torch.Tensor:
        """The values."""
        return torch.cat([param.detach().flatten() for param in self.params])


def _split(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    return flat.split([torch.Size(shape).numel() for shape in SHAPES.values()])
