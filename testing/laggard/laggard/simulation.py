"""Simulated time: when copies and kernels would run on a device of a given speed.

Streams and host threads have clocks; the times follow from sizes, and from the waits that the
program asks for. The CPU's own speed does not matter. `torch.Event.elapsed_time` gives simulated
time inside the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from laggard import _C
from laggard.detectors import DEFAULT_DELAY_US, _finish

Span = _C.Span
_link_gb_s = 0.0  # 0: exchanges between devices take no simulated time


@contextmanager
def simulated_time(**model: float) -> Iterator[None]:
    """Let all clocks begin at 0 and run by the model inside the block.

    Keywords: `copy_gb_s` (12) and `copy_us` (8) for copies between host and device; `memory_gb_s`
    (800), `tera_flops` (10) and `kernel_us` (3) for kernels; `launch_us` (5) of host time for each
    launch; `host_speed` (1): the share of a host thread's own processor time that counts.
    `link_gb_s` (none): what the device's own collectives send in a second.
    """
    global _link_gb_s
    _link_gb_s = model.pop("link_gb_s", 0.0)
    chosen = _C.TimeModel()
    for name, value in model.items():
        if not hasattr(chosen, name):
            raise TypeError(f"simulated_time has no option {name}")
        setattr(chosen, name, value)
    _finish()
    _C.set_delay(0, 0)
    _C.take_timeline()
    _C.start_simulated_time(chosen)
    try:
        yield
        _finish()
    finally:
        _C.stop_simulated_time()
        _link_gb_s = 0.0
        _C.set_delay(DEFAULT_DELAY_US, 0)


def spend_exchange(size: int) -> None:
    """Let this thread spend the time of an exchange between devices."""
    if _link_gb_s:
        _C.spend_host_time(size / (_link_gb_s * 1e6))


def take_timeline() -> list[Span]:
    """Return the copies and kernels since the last call, each with stream, begin and end."""
    return _C.take_timeline()


def host_clock_ms() -> float:
    """Return the simulated time of this host thread."""
    return _C.host_clock_ms()


def host_use(thread: int) -> tuple[float, int]:
    """Return the processor time (ms) that a thread spent inside of the device, and its launches.

    Counted in simulated time. A real device needs neither the time of the test device nor of its
    detectors; it takes some microseconds for each launch.
    """
    return _C.host_use(thread)


def spend_host_time(ms: float) -> None:
    """Let this host thread spend simulated time, e.g. for an exchange that is not simulated."""
    _C.spend_host_time(ms)
