"""Guests: workers of an elastic job that `paceline join` started, not the launcher."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable

from paceline.control.member import Member
from paceline.launcher.elastic.loss_policy import LEAVE_S
from paceline.runtime.machine import process_start

_REPORT_S = 2.0  # a longer wait for a process is reported


async def await_guests(
    guests: Iterable[Member], is_interrupted: Callable[[], bool], report: Callable[[str], None]
) -> None:
    """Wait for guests on this host that have left the job.

    They were not asked to stop, so --grace does not count: on a busy machine an exit is slow.
    """
    started_s, was_reported = time.monotonic(), False
    here = [guest for guest in guests if guest.hostname == socket.gethostname()]
    while late := [guest for guest in here if process_start(guest.pid)]:
        waited_s = time.monotonic() - started_s
        if is_interrupted() or waited_s > LEAVE_S:
            return
        if waited_s > _REPORT_S and not was_reported:
            was_reported = True
            names = ", ".join(f"{guest.role} {guest.number}" for guest in late)
            report(f"waiting for {names} to exit")
        await asyncio.sleep(0.05)
