"""The formulas, with cases that can be checked by hand."""

from __future__ import annotations

import math

import pytest

from paceline.planner import formulas


def test_a_ring_of_two_and_of_four():
    # 100 MB at 100 MB/s: two hosts send half of it twice; four hosts a quarter six times.
    assert formulas.ring_s(100e6, 2, 100e6, 0.0) == pytest.approx(1.0)
    assert formulas.ring_s(100e6, 4, 100e6, 1e-3) == pytest.approx(1.5 + 6e-3)
    assert formulas.ring_s(100e6, 1, 100e6, 1e-3) == 0.0
    assert formulas.ring_bytes(100e6, 4) == pytest.approx(150e6)


def test_one_server_for_two_workers_is_half_as_fast_as_two():
    rates = {"worker_bytes_per_s": 100e6, "server_bytes_per_s": 100e6}
    assert formulas.ps_s(100e6, 2, 1, **rates) == pytest.approx(2.0)
    assert formulas.ps_s(100e6, 2, 2, **rates) == pytest.approx(1.0)
    # A third gains nothing: the workers' own links are the limit.
    assert formulas.ps_s(100e6, 2, 3, **rates) == pytest.approx(1.0)
    slow = formulas.ps_s(100e6, 2, 2, **rates, add_bytes_per_s=50e6, latency_s=1e-3)
    assert slow == pytest.approx(2.002)


@pytest.mark.parametrize(
    ("workers", "worker_rate", "server_rate", "adds", "expected"),
    [
        (4, 1.0, 1.0, math.inf, 4),
        (8, 1.0, 4.0, math.inf, 2),
        (8, 1.0, 4.0, 2.0, 4),
        (3, 1, 10, 9, 1),
    ],
)
def test_the_balanced_number_of_servers(workers, worker_rate, server_rate, adds, expected):
    assert formulas.balanced_servers(workers, worker_rate, server_rate, adds) == expected
    rates = {"worker_bytes_per_s": worker_rate, "server_bytes_per_s": server_rate}
    times = [formulas.ps_s(1.0, workers, k, **rates, add_bytes_per_s=adds) for k in range(1, 20)]
    assert times.index(min(times)) + 1 == expected


def test_byteps_formula_at_its_ends():
    # No spare hosts: a ring. As many as workers: each worker's link carries M once.
    for n in (2, 4, 8):
        assert formulas.byteps_s(1.0, n, 0, 1.0) == pytest.approx(formulas.ring_s(1.0, n, 1.0, 0))
        assert formulas.byteps_s(1.0, n, n, 1.0) == pytest.approx(1.0)
        assert formulas.byteps_s(1.0, n, 2 * n, 1.0) == pytest.approx(1.0)
    # 4 workers, 2 spare hosts: 2*4*3 / (16 + 8 - 4) = 1.2
    assert formulas.byteps_s(1.0, 4, 2, 1.0) == pytest.approx(1.2)


def test_buckets_are_exchanged_in_order():
    assert formulas.in_order_s([1, 2, 3], [0.5, 0.5, 0.5]) == pytest.approx(3.5)  # all hidden
    assert formulas.in_order_s([1, 2, 3], [4, 1, 1]) == pytest.approx(7.0)  # one delays the rest
    assert formulas.in_order_s([3, 1], [1, 1]) == pytest.approx(5.0)  # none overtakes
    assert formulas.in_order_s([], []) == 0.0


def test_overlap_by_gamma():
    assert formulas.overlapped_s(3.0, 4.0, 1) == pytest.approx(7.0)
    assert formulas.overlapped_s(3.0, 4.0, 2) == pytest.approx(5.0)
    assert formulas.overlapped_s(3.0, 4.0, 10) == pytest.approx(4.0, rel=0.02)
    assert formulas.overlapped_s(0.0, 0.0, 3) == 0.0
    with pytest.raises(ValueError, match="1 to 10"):
        formulas.overlapped_s(1, 1, 11)


def test_the_largest_of_normal_numbers():
    # Known values: 0.5642 of 2, 1.0294 of 4, 1.8675 of 20.
    assert formulas.expected_max(1) == 0.0
    assert formulas.expected_max(2) == pytest.approx(0.5642, rel=0.05)
    assert formulas.expected_max(4) == pytest.approx(1.0294, rel=0.03)
    assert formulas.expected_max(20) == pytest.approx(1.8675, rel=0.01)
    assert formulas.slowest_of(2.0, 0.1, 4, 1) > formulas.slowest_of(2.0, 0.1, 4, 16) > 2.0


def test_batches_bubbles_and_checkpoints():
    assert formulas.batch_efficiency(1.0, 0.0, 8) == pytest.approx(1.0)
    assert formulas.batch_efficiency(0.0, 1.0, 8) == pytest.approx(1 / 8)
    assert formulas.bubble_share(4, 12) == pytest.approx(0.2)
    assert formulas.checkpoint_interval_s(2.0, 10_000.0) == pytest.approx(200.0)
    # 2 s of 200 s for checkpoints; per failure 100 s again and 60 s to restart, of 10,000 s.
    assert formulas.failure_share(200.0, 2.0, 60.0, 10_000.0) == pytest.approx(0.026)
