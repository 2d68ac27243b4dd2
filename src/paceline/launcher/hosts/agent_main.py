"""The program of an agent: reads its invitation from standard input, then serves the launcher."""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec

from paceline import __version__
from paceline.errors import PacelineError
from paceline.launcher.hosts.agent import Agent
from paceline.launcher.hosts.messages import AGENT_PREFIX, MAX_INVITATION_BYTES, Invitation
from paceline.runtime.console import set_prefix, warn

# The engine shows these exit codes together with the last line of standard error.
OTHER_VERSION, FAILED = 3, 4


class _Version(msgspec.Struct):
    """The part of an invitation that every version can read."""

    version: str


def main() -> int:
    """Run an agent; return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPWR):
        # It ends with its launcher. Not SIG_IGN: the processes of the job would inherit that.
        signal.signal(number, lambda *_: None)
    set_prefix(AGENT_PREFIX)
    line = sys.stdin.buffer.readline(MAX_INVITATION_BYTES)
    try:
        found = msgspec.json.decode(line, type=_Version).version
    except (ValueError, RecursionError):  # ValueError: msgspec's and Unicode's
        warn("standard input has no invitation of a launcher; start jobs with `paceline run`")
        return FAILED
    if found != __version__:
        warn(
            f"Paceline {__version__} is installed here, {found} on the launcher's host; install"
            " the same version"
        )
        return OTHER_VERSION
    try:
        asyncio.run(Agent(Invitation.decode(line)).run())
    except PacelineError as error:
        warn(str(error))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
