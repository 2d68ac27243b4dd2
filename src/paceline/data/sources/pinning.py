"""Batches in pinned memory: a device copies them while it computes (pin_memory=True)."""

from __future__ import annotations

from functools import cache

from paceline.comm.devices import accelerator, pinned_bytes
from paceline.runtime.console import say


def can_pin_batches() -> bool:
    """Return whether there is a device, and batches for it can be pinned."""
    return accelerator() is not None and not is_pinning_refused()


@cache
def is_pinning_refused() -> bool:
    """Return whether there is a device, but the machine pins no memory for it; log that once."""
    if accelerator() is None or pinned_bytes(1) is not None:
        return False
    say(
        "pin_memory=True: this machine cannot pin host memory (see ulimit -l), so batches are in"
        " ordinary memory, and copies to the device wait"
    )
    return True
