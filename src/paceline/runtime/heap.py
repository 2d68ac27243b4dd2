"""What malloc does with memory that threads of other libraries free in each step.

XLA takes the temporary memory of a step, 100 MB for a model of 25 M parameters, on a thread of its
own. glibc gives such threads heaps of at most 64 MB; whatever is larger comes from the kernel and
goes back to it at once, whatever the thresholds are. The next step pays for fresh, zeroed pages:
44 ms of a step of 127 ms. With one heap for all threads freed memory is kept.
"""

from __future__ import annotations

import ctypes
import sys

from paceline import _core

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def keep_memory_of_xla() -> None:
    """Keep memory that XLA frees, in a process that computes with JAX. Does nothing in others.

    Threads that have allocated memory already keep the heap that they have, so this comes before
    the first array.
    """
    keras = sys.modules.get("keras")  # it imports JAX on every backend
    if "jax" not in sys.modules or (keras is not None and keras.config.backend() != "jax"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no such setting
    if mallopt is not None and _core.keep_freed_memory():
        mallopt(_ARENA_MAX, 1)
