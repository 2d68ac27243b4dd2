"""The collectives as the benchmark sees them: which memory each needs and what it must leave there.

The size of an operation is that of the larger tensor of a rank: what it contributes to a
reduce_scatter or receives from an all_gather. The root is rank 0. In send_recv, even ranks send to
the next odd one.
"""

from __future__ import annotations

from harness import values
from harness.values import Array

COLLECTIVES = (
    "broadcast",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)


def num_elements(op: str, count: int, world: int) -> tuple[int, int]:
    """Return the elements of the source and of a separate target (0: the source is the target)."""
    part = count // world
    if op in ("reduce_scatter", "scatter"):
        return count, part
    if op in ("all_gather", "gather"):
        return part, count
    if op in ("all_to_all", "all_reduce_out", "exchange"):
        return count, count
    return count, 0


def is_right(
    op: str, source: Array, target: Array, rank: int, world: int, seed: int, calls: int
) -> bool:
    """Compare the result of the operation with the expected one."""
    part = target.size // world
    if op in ("all_reduce", "all_reduce_out"):
        repeats = calls if op == "all_reduce" else 1
        return values.holds_sum(target, world, seed, calls=repeats)
    if op == "reduce":
        return rank != 0 or values.holds_sum(source, world, seed)
    if op == "broadcast":
        return values.holds_copy(source, 0, seed)
    if op == "reduce_scatter":
        return values.holds_sum(target, world, seed, offset=rank * target.size)
    if op == "scatter":
        return values.holds_copy(target, 0, seed, offset=rank * target.size)
    if op == "gather" and rank != 0:
        return True
    if op in ("all_gather", "gather", "all_to_all"):
        offset = rank * part if op == "all_to_all" else 0
        pieces = [target[r * part : (r + 1) * part] for r in range(world)]
        return all(values.holds_copy(x, r, seed, offset) for r, x in enumerate(pieces))
    if op == "send_recv":
        return rank % 2 == 0 or values.holds_copy(source, rank - 1, seed)
    if op == "exchange":
        return values.holds_copy(target, (rank + world // 2) % world, seed)
    return op == "barrier"
