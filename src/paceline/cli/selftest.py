"""The job of `paceline doctor --run`: collectives on real processes, checked number by number.

Run by the launcher as a module on every rank. It uses the public interface only, so it fails where
a user's script would fail. Sizes cross the engine's borders: one element, a few cache lines, and
several segments. A wrong number is an error with the rank, the operation and both values.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SIZES = (1, 1000, 3_000_001)


def main() -> None:
    """Join the job, try each operation, and print one line per operation on rank 0."""
    import torch

    import paceline as pl

    pl.init()
    world, rank, size = pl.world(), pl.rank(), pl.world_size()
    total = size * (size + 1) / 2

    def all_reduce() -> None:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            for length in _SIZES:
                tensor = torch.full((length,), rank + 1, dtype=dtype)
                world.all_reduce(tensor)
                _expect(rank, f"all_reduce {dtype}", tensor.double(), total)

    def in_engine_memory() -> None:
        tensor = pl.empty((_SIZES[-1],), dtype=torch.float32)
        tensor.fill_(rank + 1)
        world.all_reduce(tensor)
        _expect(rank, "all_reduce in engine memory", tensor.double(), total)

    def broadcast() -> None:
        tensor = torch.full((_SIZES[1],), float(rank))
        world.broadcast(tensor, root=size - 1)
        _expect(rank, "broadcast", tensor.double(), size - 1)

    def barrier() -> None:
        for _ in range(20):
            world.barrier()

    trials: dict[str, Callable[[], None]] = {
        "all_reduce": all_reduce,
        "all_reduce in engine memory": in_engine_memory,
        "broadcast": broadcast,
        "20 barriers": barrier,
    }
    for name, trial in trials.items():
        started_s = time.perf_counter()
        trial()
        if rank == 0:
            print(f"{name}: right, {1e3 * (time.perf_counter() - started_s):.1f} ms")  # noqa: T201
    pl.shutdown()


def _expect(rank: int, what: str, found: object, expected: float) -> None:
    import torch

    assert isinstance(found, torch.Tensor)
    wrong = (found != expected).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise SystemExit(
            f"rank {rank}: {what}: element {index} of {found.numel()} is {float(found[index])},"
            f" expected {expected}; please report this with the output of `paceline doctor`"
        )


if __name__ == "__main__":
    main()
