"""Which server holds what: large flat tensors are cut into equal parts, small ones stay whole.

An ITEM is a flat tensor (a bucket's, or the array of a key); a PART is a contiguous range of it on
one server, from which a shard is made. Every part costs a message per step, so an item is cut only
as far as parts remain worth one; and each of its parts goes to another server, so that the
servers work on an item at the same time. Items are placed from the largest to the smallest, the
larger parts with the servers that have least: what cannot be cut evenly is made up for by what is
placed later.

Plain arithmetic; every worker computes the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.errors import UsageError
from paceline.runtime.formatting import data_size

# Optimizers that treat every element of a parameter by itself, so that it can be cut anywhere.
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"),
    *("ASGD", "Rprop"),
)
_PAGE_BYTES = 4096  # parts begin on pages: a worker can map each from another server
_WORTH_BYTES = 64 * 1024  # moving this takes about as long as a message costs besides


@dataclass(frozen=True)
class Placement:
    """Elements `start` to `stop` of item number `item`, held by server number `server`."""

    item: int
    start: int
    stop: int
    server: int


def place(
    sizes: Sequence[int],
    num_servers: int,
    *,
    itemsizes: Sequence[int],
    cuts: Sequence[Sequence[int]] | None = None,
) -> list[Placement]:
    """Place items of `sizes` elements, of `itemsizes` bytes each, over the servers.

    `cuts`: the only positions, per item, at which it may be cut; without them, anywhere on
    pages. Returns the parts by item and start. An empty item is one empty part.
    """
    if num_servers < 1:
        raise UsageError(f"parameters cannot be placed on {num_servers} servers; start at least 1")
    num_bytes = [size * itemsize for size, itemsize in zip(sizes, itemsizes, strict=True)]
    loads = [0] * num_servers
    parts: list[Placement] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-num_bytes[i], i)):
        num_parts = max(min(num_servers, num_bytes[item] // _WORTH_BYTES), 1)
        if cuts is None:
            borders = _on_pages(sizes[item], num_parts, itemsizes[item])
        else:
            borders = _at_cuts(sizes[item], num_parts, cuts[item])
        by_size = sorted(pairwise(borders), key=lambda ends: (ends[0] - ends[1], ends[0]))
        by_load = sorted(range(num_servers), key=lambda server: (loads[server], server))
        for (start, stop), server in zip(by_size, by_load, strict=False):
            parts.append(Placement(item, start, stop, server))
            loads[server] += (stop - start) * itemsizes[item]
    return sorted(parts, key=lambda part: (part.item, part.start))


def _on_pages(size: int, num_parts: int, itemsize: int) -> list[int]:
    """Return the borders of equal parts: 0, where pages begin, and the size."""
    page = max(_PAGE_BYTES // itemsize, 1)
    pages = -(-size // page)
    return [min(-(-pages * part // num_parts) * page, size) for part in range(num_parts + 1)]


def _at_cuts(size: int, num_parts: int, cuts: Sequence[int]) -> list[int]:
    """Return borders that are allowed, each as near as possible to that of an equal part."""
    allowed = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    targets = [size * part / num_parts for part in range(num_parts + 1)]
    nearest = {min(allowed, key=lambda cut: abs(cut - target)) for target in targets}
    return sorted(nearest) if size else [0, 0]


def balance(parts: Sequence[Placement], itemsizes: Sequence[int], num_servers: int) -> str:
    """Return how much each server holds, and how uneven that is, for people."""
    loads, counts = [0] * num_servers, [0] * num_servers
    for part in parts:
        loads[part.server] += (part.stop - part.start) * itemsizes[part.item]
        counts[part.server] += 1
    shares = [
        f"server {server}: {data_size(load)} in {count} shard{'s' * (count != 1)}"
        for server, (load, count) in enumerate(zip(loads, counts, strict=True))
        if load
    ]
    idle = [str(server) for server, load in enumerate(loads) if not load]
    if idle:
        shares.append(f"nothing on server{'s' * (len(idle) > 1)} {', '.join(idle)}")
    mean = sum(loads) / num_servers
    worst = f" (largest {max(loads) / mean:.2f} x the mean)" if mean else ""
    return ", ".join(shares) + worst
