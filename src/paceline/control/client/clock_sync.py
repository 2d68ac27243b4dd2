"""How a member learns the job's clock: it asks the coordinator over its control connection.

A process with the same clock as the coordinator (`config.clock_id`) adds nothing, exactly; another
one asks several times, takes the quickest answer, and does so again every half a minute, because
clocks of different machines drift apart.

Threads: everything runs in the agent's control thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.control.client.requests import expect
from paceline.control.transport import messages as m
from paceline.errors import PacelineError
from paceline.observe.telemetry.clock import Offset, Ping, estimate, set_offset
from paceline.runtime.config import clock_id

PINGS = 8
AGAIN_S = 30.0  # at 50 parts in a million, clocks are 1.5 ms apart by then

log = logging.getLogger("paceline.control")

Ask = Callable[[Callable[[int], Any]], Awaitable[m.Answer]]


async def follow(ask: Ask) -> None:
    """Keep the clock of this process in step with the coordinator's; returns if it is the same."""
    mine = clock_id()
    while True:
        try:
            measured = await measure(ask, mine)
        except PacelineError as error:  # an old or absent coordinator: the clock stays as it is
            log.debug("the coordinator's clock is not known: %s", error)
            measured = None
        if measured is not None:
            set_offset(measured.offset_s)
            if measured.error_s == 0.0:
                return
        await asyncio.sleep(AGAIN_S)


async def measure(ask: Ask, mine: str, pings: int = PINGS) -> Offset:
    """Return how far the coordinator's clock is ahead of ours, whose name is `mine`."""
    seen: list[Ping] = []
    for _ in range(pings):
        sent_s = time.monotonic()
        told = expect(await ask(m.AskClock), m.ClockIs)
        if told.clock_id == mine:
            return Offset(0.0, 0.0)
        seen.append(Ping(sent_s, time.monotonic(), told.now_s))
    return estimate(seen)
