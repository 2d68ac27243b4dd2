"""What an exchange takes, in seconds: rings, servers, shared memory. Nothing but arithmetic.

M bytes of gradient, n workers, k servers, link rate B (each direction), latency a. The sources are
named at each formula; tests/unit/planner/test_formulas.py has exact cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def ring_s(num_bytes: float, num_hosts: int, bytes_per_s: float, latency_s: float) -> float:
    """Return the time of a ring all-reduce: T = 2 (n-1) (a + M / (n B))."""
    if num_hosts < 2:
        return 0.0
    hops = 2 * (num_hosts - 1)
    return hops * (latency_s + num_bytes / (num_hosts * bytes_per_s))


def ring_bytes(num_bytes: float, num_hosts: int) -> float:
    """Return what each host of a ring sends: 2 (n-1)/n M."""
    return 2 * (num_hosts - 1) / num_hosts * num_bytes if num_hosts > 1 else 0.0


def ps_s(
    num_bytes: float,
    num_workers: int,
    num_servers: int,
    *,
    worker_bytes_per_s: float,
    server_bytes_per_s: float,
    add_bytes_per_s: float = math.inf,
    latency_s: float = 0.0,
) -> float:
    """Return the time of push and pull through dedicated servers, pipelined.

    T = 2a + max(M / B_w, n M / (k B_s), n M / (k R)), where R is what a server can add. Links carry
    both directions at once, so a pipelined push and pull cost the larger one.
    """
    total = num_workers * num_bytes / num_servers
    slowest = max(
        num_bytes / worker_bytes_per_s, total / server_bytes_per_s, total / add_bytes_per_s
    )
    return 2 * latency_s + slowest


def balanced_servers(
    num_workers: int,
    worker_bytes_per_s: float,
    server_bytes_per_s: float,
    add_bytes_per_s: float = math.inf,
) -> int:
    """Return the smallest number of servers that are not the limit.

    k* = max(ceil(n B_w / B_s), ceil(n B_w / R)), and at least 1.
    """
    wanted = num_workers * worker_bytes_per_s / min(server_bytes_per_s, add_bytes_per_s)
    return max(1, math.ceil(wanted - 1e-9))


def byteps_s(num_bytes: float, num_workers: int, num_spare: int, bytes_per_s: float) -> float:
    """Return the time with servers on k spare hosts and beside the n workers, split the best way.

    t = 2 n (n-1) M / ((n^2 + k n - 2 k) B) (BytePS). Without spare hosts it is a ring. With
    k >= n the spare hosts do everything and a worker's own link is the limit: M / B.
    """
    n, k = num_workers, num_spare
    if n < 2:
        return 0.0
    best = 2 * n * (n - 1) * num_bytes / ((n * n + k * n - 2 * k) * bytes_per_s)
    return max(best, num_bytes / bytes_per_s)


# -- overlap ------------------------------------------------------------------------------------


def in_order_s(ready_s: Sequence[float], takes_s: Sequence[float]) -> float:
    """Return when the last bucket is exchanged, in the reducer's order.

    A bucket starts when it is ready and the one before it has ended; none overtakes another.
    """
    end_s = 0.0
    for ready, takes in zip(ready_s, takes_s, strict=True):
        end_s = max(end_s, ready) + takes
    return end_s


def overlapped_s(compute_s: float, network_s: float, gamma: float) -> float:
    """Return AdaptDL's step: (T_c^g + T_n^g)^(1/g); g = 1 is no overlap, 10 nearly full overlap."""
    if not 1 <= gamma <= 10:
        raise ValueError(f"gamma is {gamma}; AdaptDL's formula has 1 to 10")
    largest = max(compute_s, network_s)
    if largest <= 0:
        return 0.0
    parts = (compute_s / largest) ** gamma + (network_s / largest) ** gamma
    return float(largest * parts ** (1 / gamma))


# -- chance -------------------------------------------------------------------------------------


def expected_max(count: int) -> float:
    """Return the mean of the largest of so many standard normal numbers (Blom's formula)."""
    if count < 2:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def slowest_of(mean_s: float, cv: float, num_workers: int, steps: int = 1) -> float:
    """Return the mean step of the slowest worker, over blocks of `steps` in which it can catch up.

    A block's sum has the standard deviation cv * mean * sqrt(steps).
    """
    return mean_s * (1 + cv * expected_max(num_workers) / math.sqrt(steps))


def batch_efficiency(noise: float, signal: float, scale: float) -> float:
    """Return AdaptDL's efficiency of a batch that is `scale` times as large.

    (s2 + m2) / (s2 / scale + m2) / scale, with s2 the variance of gradients and m2 the squared norm
    of their mean: 1 if gradients are all noise, 1 / scale if they have none.
    """
    return (noise + signal) / (noise / scale + signal) / scale


def bubble_share(num_stages: int, num_microbatches: int) -> float:
    """Return the idle share of a pipeline: (p-1) / (m + p - 1)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


# -- failures -----------------------------------------------------------------------------------


def checkpoint_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval between two checkpoints: sqrt(2 C MTBF)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def failure_share(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time lost to checkpoints and failures, at most 1.

    C / interval for checkpoints; for each failure half an interval is repeated, after a restart.
    """
    lost = cost_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s
    return min(1.0, lost)
