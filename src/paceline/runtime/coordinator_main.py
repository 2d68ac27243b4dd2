"""The main program of a job's coordinator: `python -m paceline.runtime.coordinator_main`, run by
the launcher.

It serves on a listening socket that it inherits, so that its address outlives it: if it is killed
and restarted with the same arguments, it resumes from its journal. It does not import torch, so a
restart takes a fraction of a second. It dies with the launcher unless --detached is given.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.coordinator.journal import Journal
from paceline.control.membership.policy import Policy
from paceline.control.transport.auth import load_secret
from paceline.control.transport.sockets import close_in_children
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.console import set_prefix, warn

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    options = _options(arguments)
    set_prefix("coordinator: ")
    logging.basicConfig(format="coordinator: %(message)s", level=logging.WARNING)  # of asyncio
    if not options.detached:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    try:
        return asyncio.run(_serve(options))
    except PacelineError as error:
        warn(f"{type(error).__name__}: {error}")
        return 1


def arguments(
    *,
    job_id: str,
    secret_file: str,
    journal: str,
    policy: Policy,
    join_timeout_s: float,
    is_detached: bool = False,
) -> list[str]:
    """Return the arguments of this program, without the last one: the inherited socket."""
    text = msgspec.json.encode(policy).decode()
    words = ["--job", job_id, "--secret-file", secret_file, "--journal", journal]
    words += ["--policy", text, "--join-timeout-s", str(join_timeout_s)]
    return [*words, "--detached"] if is_detached else words


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="paceline.runtime.coordinator_main", description=__doc__)
    parser.add_argument("--job", required=True, help="the job's id")
    parser.add_argument("--secret-file", required=True, help="file of the job's secret (0600)")
    parser.add_argument("--journal", required=True, type=Path, help="file to write and resume from")
    parser.add_argument("--policy", required=True, help="JSON of control.membership.policy.Policy")
    parser.add_argument("--join-timeout-s", type=float, default=60.0)
    parser.add_argument("--detached", action="store_true", help="outlive the launcher")
    parser.add_argument("socket", type=int, help="file descriptor of the listening socket")
    return parser.parse_args(words)


async def _serve(options: argparse.Namespace) -> int:
    policy = _policy(options.policy)
    journal = Journal(options.journal, options.job, policy)
    journal.on_failure = _end
    coordinator = Coordinator(
        options.job,
        load_secret(options.secret_file),
        policy.num_workers + policy.num_servers,
        options.join_timeout_s,
        policy=policy,
        journal=journal,
    )
    listener = close_in_children(socket.socket(fileno=options.socket))
    listener.setblocking(False)
    await coordinator.serve(listener)
    is_terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_terminated.set)
    ends = [asyncio.ensure_future(one) for one in (is_terminated.wait(), coordinator.failed())]
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in done:
        end.result()  # a failure ends this process: the next one resumes from the journal
    await coordinator.stop()
    return 0


def _end(why: str) -> None:
    """Exit at once: the next coordinator resumes from what is written."""
    warn(f"{why}; free some space there")
    os._exit(1)


def _policy(text: str) -> Policy:
    try:
        return msgspec.json.decode(text, type=Policy)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--policy is not the JSON of a Policy: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
