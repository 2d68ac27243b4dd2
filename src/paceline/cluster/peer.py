"""A member as the coordinator sees it: its connection, and what it waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.cluster import messages as m
from paceline.cluster.auth import Hello
from paceline.cluster.channel import Channel
from paceline.cluster.member import Member
from paceline.cluster.store_service import Value
from paceline.errors import PacelineError

log = logging.getLogger("paceline.cluster")


class Peer:
    """One authenticated connection; `member` is set once it has joined, or asked to."""

    def __init__(self, channel: Channel[m.MemberMessage], caller: Hello) -> None:
        self.channel, self.caller = channel, caller
        self.member: Member | None = None
        self.join: m.Join | m.Ready | None = None  # asked, and not answered yet
        self.farewell: m.Leave | None = None
        self.waits: dict[int, Callable[[], None]] = {}  # request id -> forget it

    def answer(self, request_id: int, value: Value | PacelineError) -> None:
        self.waits.pop(request_id, None)
        if isinstance(value, PacelineError):
            self.tell(m.Failure(request_id, type(value).__name__, str(value)))
        else:
            self.tell(m.Reply(request_id, value))

    def tell(self, message: m.CoordinatorMessage) -> None:
        try:
            self.channel.send(message)
        except PacelineError as error:  # it does not read; its own task will see the closed channel
            log.warning("rank %d: %s", self.caller.rank, error)
