"""What lies in shared memory under a name, and would stay there: nothing of ours ever should."""

from __future__ import annotations

import os

# What other tests may put there at the same time, and take away: data loaders, and a quick disk.
_OF_TESTS = ("torch_", "sem.", "psm_", "paceline-crashes-")


def named_memory() -> set[str]:
    """Return the names, but for those of other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_TESTS)}
