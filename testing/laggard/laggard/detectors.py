"""The detectors: schedules that make a missing wait visible, races, and host synchronisations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from laggard import _C

Race = _C.Race
Synchronization = _C.Synchronization

DEFAULT_DELAY_US = 200


@contextmanager
def random_schedule(seed: int, *, delay_us: int = DEFAULT_DELAY_US) -> Iterator[None]:
    """Delay each kernel and copy by a random time, up to 1.25 x `delay_us`. The seed decides."""
    _C.set_delay(delay_us, seed)
    try:
        yield
        _finish()
    finally:
        _C.set_delay(DEFAULT_DELAY_US, 0)


@contextmanager
def lazy_schedule() -> Iterator[None]:
    """Let a stream run only what a host thread or another stream waits for."""
    _C.set_delay(0, 0)
    _C.set_lazy(True)
    try:
        yield
        _finish()
    finally:
        _C.set_lazy(False)
        _C.set_delay(DEFAULT_DELAY_US, 0)


def _finish() -> None:
    """Run what is queued under the schedule that it was queued under. Not counted."""
    _C.set_counted(False)
    try:
        for index in range(_C.DEVICES):
            _C.synchronize(index)
    finally:
        _C.set_counted(True)


@contextmanager
def race_mode(mode: str) -> Iterator[None]:
    """Set what happens at a race: "record" (the default), "raise" at the launch, or "off"."""
    _C.set_race_mode(mode)
    try:
        yield
    finally:
        _C.set_race_mode("record")


def take_races() -> list[Race]:
    """Return the races since the last call. `race.report` has both Python stacks."""
    return _C.take_races()


def take_synchronizations() -> list[Synchronization]:
    """Return the waits of host threads for a device since the last call, with reason and stack."""
    return _C.take_synchronizations()


@contextmanager
def no_races() -> Iterator[None]:
    """Raise AssertionError at the end of the block if a race was found inside it."""
    take_races()
    yield
    torch.accelerator.synchronize()
    if races := take_races():
        raise AssertionError(f"laggard found {len(races)} races; the first:\n{races[0].report}")
