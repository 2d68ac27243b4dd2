"""kubelet's probe of a pod: exit code 0 if the pod's program beats, else 1 and the reason."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.launcher.engines.kubernetes.heartbeat import HEARTBEAT_DIRECTORY, problem
from paceline.runtime.console import warn


def main() -> int:
    """Look at the heartbeat; return the exit code."""
    found = problem(Path(HEARTBEAT_DIRECTORY))
    if found:
        warn(found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
