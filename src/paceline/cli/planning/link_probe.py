"""The job that measures links between hosts: one worker on each host, pair by pair.

Run by the launcher as a module (`paceline plan --hosts a,b`). A pair measures while the others
wait: the latency by small messages and their answers, then both directions at once with 4 MB each,
over the same connections that training uses. Rank 0 writes a JSON file: its argument.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

_ROUND_TRIPS = 20
_ELEMENTS = 1 << 20  # float32
_EXCHANGES = 4
_MOST_S = 3.0  # of one pair: a slow link is measured with fewer exchanges


def main() -> None:
    """Join the job, measure all pairs, and write what was found."""
    import torch

    import paceline as pl

    pl.init()
    world, rank, size = pl.world(), pl.rank(), pl.world_size()
    small, large = torch.zeros(1), torch.zeros(_ELEMENTS)
    other = torch.zeros(_ELEMENTS)
    found: list[list[float]] = []
    for low in range(size):
        for high in range(low + 1, size):
            figures = torch.zeros(3, dtype=torch.float64)
            if rank in (low, high):
                peer = high if rank == low else low
                latencies = []
                for _ in range(_ROUND_TRIPS):
                    start_s = time.perf_counter()
                    if rank == low:
                        world.send(small, peer)
                        world.recv(small, peer)
                    else:
                        world.recv(small, peer)
                        world.send(small, peer)
                    latencies.append((time.perf_counter() - start_s) / 2)
                rates: list[float] = []
                begin_s = time.perf_counter()
                # Both decide by the same count: the higher rank follows the lower one's word.
                for number in range(_EXCHANGES):
                    start_s = time.perf_counter()
                    sent = world.send(large, peer, tag=1, async_op=True)
                    world.recv(other, peer, tag=1)
                    assert sent is not None
                    sent.wait()
                    rates.append(large.nbytes / (time.perf_counter() - start_s))
                    is_last = time.perf_counter() - begin_s > _MOST_S or number == _EXCHANGES - 1
                    word = torch.tensor([float(is_last)])
                    if rank == low:
                        world.send(word, peer, tag=2)
                    else:
                        world.recv(word, peer, tag=2)
                    if word.item():
                        break
                kept = rates[1:] or rates  # the first exchange opens the connection
                spread = statistics.pstdev(kept) / statistics.fmean(kept)
                figures[:] = torch.tensor(
                    [statistics.median(kept), min(latencies[1:]), spread], dtype=torch.float64
                )
            world.broadcast(figures, root=low)
            found.append([low, high, *(float(one) for one in figures)])
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    pl.shutdown()


if __name__ == "__main__":
    main()
