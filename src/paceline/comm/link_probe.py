"""Measure the links between hosts, pair by pair, over the connections that training uses.

A pair measures while the others wait: the latency by small messages and their answers, then both
directions at once with 4 MB each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from paceline.comm.group import Group

_ROUND_TRIPS = 20
_ELEMENTS = 1 << 20  # float32
_EXCHANGES = 4
_MOST_S = 3.0  # of one pair: a slow link is measured with fewer exchanges
_ALL_PAIRS = 6  # with more hosts, neighbours in a ring only

LinkRow = tuple[int, int, float, float, float]  # two members, bytes/s, latency, spread of the rate


def pairs_of(members: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs to measure: all, or of many members each with the next one.

    >>> pairs_of([0, 2, 4])
    [(0, 2), (0, 4), (2, 4)]
    """
    if len(members) <= _ALL_PAIRS:
        return [(low, high) for at, low in enumerate(members) for high in members[at + 1 :]]
    ring = zip(members, [*members[1:], members[0]], strict=True)
    return [(min(pair), max(pair)) for pair in ring]


def measure_links(
    group: Group, pairs: Sequence[tuple[int, int]], most_s: float = _MOST_S
) -> list[LinkRow]:
    """Return the rate in each direction, the latency and the spread of the rate for each pair.

    Collective: all members of the group call it with the same pairs of ranks in the group.
    """
    found = []
    for low, high in pairs:
        figures = torch.zeros(3, dtype=torch.float64)
        if group.rank in (low, high):
            figures[:] = torch.tensor(_measure_pair(group, low, high, most_s), dtype=torch.float64)
        group.broadcast(figures, root=low)
        rate, latency_s, spread = (float(one) for one in figures)
        found.append((low, high, rate, latency_s, spread))
    return found


def _measure_pair(group: Group, low: int, high: int, most_s: float) -> tuple[float, float, float]:
    is_low = group.rank == low
    peer = high if is_low else low
    small, large = torch.zeros(1), torch.zeros(_ELEMENTS)
    other = torch.zeros(_ELEMENTS)
    latencies = []
    for _ in range(_ROUND_TRIPS):
        start_s = time.perf_counter()
        if is_low:
            group.send(small, peer)
            group.recv(small, peer)
        else:
            group.recv(small, peer)
            group.send(small, peer)
        latencies.append((time.perf_counter() - start_s) / 2)
    rates: list[float] = []
    begin_s = time.perf_counter()
    for number in range(_EXCHANGES):
        start_s = time.perf_counter()
        sent = group.send(large, peer, tag=1, async_op=True)
        group.recv(other, peer, tag=1)
        assert sent is not None
        sent.wait()
        rates.append(large.nbytes / (time.perf_counter() - start_s))
        # Both take the same number: the higher rank follows the lower one's word.
        is_last = time.perf_counter() - begin_s > most_s or number == _EXCHANGES - 1
        word = torch.tensor([float(is_last)])
        if is_low:
            group.send(word, peer, tag=2)
        else:
            group.recv(word, peer, tag=2)
        if word.item():
            break
    kept = rates[1:] or rates  # the first exchange opens the connection
    spread = statistics.pstdev(kept) / statistics.fmean(kept)
    return statistics.median(kept), min(latencies[1:]), spread
