"""A test device for PyTorch whose work is late on purpose.

Importing the package registers two devices, `laggard:0` and `laggard:1`. They compute on the CPU,
each stream in a thread of its own. A program that is right on every schedule gets the CPU's
results. A program that forgets a wait gets NaN, a crash with the Python line, or a report with two
stacks.
"""

from __future__ import annotations

import atexit
import faulthandler
import sys

import torch

# The name has to be set before the extension registers its backend under it.
torch.utils.rename_privateuse1_backend("laggard")

from laggard import _C, device_module  # noqa: E402
from laggard.detectors import (  # noqa: E402
    Race,
    Synchronization,
    lazy_schedule,
    no_races,
    race_mode,
    random_schedule,
    take_races,
    take_synchronizations,
)
from laggard.simulation import (  # noqa: E402
    Span,
    host_clock_ms,
    host_use,
    simulated_time,
    spend_host_time,
    take_timeline,
)

__all__ = [
    "Race",
    "Span",
    "Synchronization",
    "host_clock_ms",
    "host_use",
    "lazy_schedule",
    "no_races",
    "race_mode",
    "random_schedule",
    "simulated_time",
    "spend_host_time",
    "take_races",
    "take_synchronizations",
    "take_timeline",
]

torch._register_device_module("laggard", device_module)
sys.modules["torch.laggard"] = device_module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True, for_packed_sequence=False)
if not faulthandler.is_enabled() and sys.__stderr__ is not None:
    faulthandler.enable(sys.__stderr__)  # prints the Python line of a touch of closed memory
_C.explain_crashes()
atexit.register(_C.stop)  # queued kernels must not run while Python ends

if torch.distributed.is_available():
    from laggard import collectives

    collectives.register()
