"""Who is slow, and why: from the times of all workers, as they arrive."""

from __future__ import annotations

from paceline.observe.telemetry.step_times import StepTimes, WaitStats


def lockstep(waits: WaitStats, local: dict[int, tuple[float, float]], steps: int = 10) -> None:
    """Feed steps in which every worker waits for the slowest; `local`: (input, compute)."""
    longest = max(sum(parts) for parts in local.values()) + 0.01
    for number in range(1, steps + 1):
        for worker, (input_s, compute_s) in local.items():
            wait_s = longest - input_s - compute_s
            step = StepTimes(number, number * longest, longest, input_s, wait_s, 32)
            waits.add(worker, [step], len(local))


def test_the_one_that_waits_least_is_the_culprit():
    waits = WaitStats()
    lockstep(waits, {0: (0.1, 1.0), 1: (0.1, 2.0), 2: (0.1, 1.0)})
    found = waits.bottleneck()
    assert found is not None and (found.worker, found.cause) == (1, "compute")
    assert 1.8 < found.times < 2.0
    assert set(waits.workers[0].waited_for_s) == {1}
    assert abs(waits.workers[0].waited_for_s[1] - 10 * 1.01) < 1e-6
    assert not waits.workers[1].waited_for_s


def test_a_slow_loader_is_told_from_a_slow_computation():
    waits = WaitStats()
    lockstep(waits, {0: (0.1, 1.0), 1: (1.5, 1.0)})
    found = waits.bottleneck()
    assert found is not None and (found.worker, found.cause) == (1, "input")


def test_all_wait_alike_for_the_network():
    waits = WaitStats()
    for number in range(1, 11):
        for worker in range(3):
            waits.add(worker, [StepTimes(number, number, 1.0, 0.0, 0.5)], 3)
    found = waits.bottleneck()
    assert found is not None and (found.worker, found.cause) == (None, "network")


def test_nothing_to_say_about_even_workers_or_one_alone():
    waits = WaitStats()
    lockstep(waits, {0: (0.0, 1.0), 1: (0.0, 1.0)})
    assert waits.bottleneck() is None
    alone = WaitStats()
    alone.add(0, [StepTimes(n, n, 1.0, 0.0, 0.9) for n in range(1, 9)], 1)
    assert alone.bottleneck() is None


def test_a_worker_that_never_tells_is_not_waited_for():
    waits = WaitStats()
    for number in range(1, 1000):
        waits.add(0, [StepTimes(number, number, 1.0, 0.0, 0.5)], 3)
        waits.add(1, [StepTimes(number, number, 1.0, 0.0, 0.0)], 3)
    assert len(waits._open) <= 256
    assert waits.workers[0].waited_for_s[1] > 300
