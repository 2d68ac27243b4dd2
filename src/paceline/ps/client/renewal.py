"""The line in use, and its renewal when another server answers: one line after the other.

A line is given up when it breaks, or when the newest membership names another primary; the next one
is formed as soon as there is somebody to form it with (primary.py decides). In between there is
none. A server of this host that is not a member any more is ended before anybody goes on without
it: it sees this worker's memory, and would write to it when it is continued.

Threads: none of its own; the link calls under its lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from paceline import errors
from paceline.comm.fabric import Fabric
from paceline.control.member import Member, Membership
from paceline.ps.client.link import Wire
from paceline.ps.client.primary import Connect, GiveUp, Post, course, post_of

_ACCUSE_S = 0.5  # how long the coordinator may take to miss a server by itself
_CUT_OFF_S = 20.0  # without the coordinator nobody knows who answers


class News(Protocol):
    """What the coordinator says: an agent."""

    @property
    def over(self) -> str | None: ...
    @property
    def ending(self) -> errors.PacelineError | None: ...
    @property
    def is_attached(self) -> bool: ...
    def wait_for_generation(self, above: int, timeout_s: float) -> object: ...
    def accuse(self, rank: int, why: str) -> None: ...


class Renewal:
    """One worker's lines to the servers of one partition, at most one at a time."""

    def __init__(self, fabric: Fabric, partition: int, news: News) -> None:
        self.line: Wire | None = None
        self.why: errors.PeerError | None = None  # the last line broke; None: it did not
        self._fabric, self._partition, self._news = fabric, partition, news
        self._used: Post | None = None  # whose line that is
        self._broken: Post | None = None  # whose line broke last
        self._broke_s = 0.0
        self._accused_s = 0.0
        self._greeted = 0  # the generation whose servers have been linked

    @property
    def newest(self) -> Membership:
        """What the coordinator has announced last."""
        return self._fabric.newest() or self._fabric.membership

    @property
    def server(self) -> Member | None:
        """Who answers, or will once there is a line; None when nobody can."""
        if self.line is not None:
            return self.line.member
        newest = self.newest
        post = post_of(newest, self._partition)
        return None if post is None else newest.member(post.server)

    def renew(self) -> bool:
        """See to the line; true if it is another one than before. ServerLost: there is none."""
        if isinstance(self._news.ending, errors.Evicted):
            raise self._news.ending
        newest = self.newest
        self._greet(newest)
        chosen = course(newest, self._partition, self._fabric.rank, self._used, self._broken)
        if isinstance(chosen, GiveUp) or self._news.over is not None:
            raise self.loss()
        if not isinstance(chosen, Connect):
            return False
        self._end_old(newest)
        try:
            self.line = Wire(self._fabric, newest, self._partition, chosen.post.server)
        except (errors.PeerError, errors.ConnectError, errors.RendezvousError) as error:
            self._note(chosen.post, error)
            return False
        self._used, self.why = chosen.post, None
        return True

    def _greet(self, newest: Membership) -> None:
        """Let every copy of the partition on this host see this worker's memory."""
        if newest.generation == self._greeted or self._fabric.rank not in newest.ranks:
            return
        self._greeted, index = newest.generation, self._partition
        servers = newest.holders[index] + (newest.filling[index] if newest.filling else ())
        for server in map(newest.member, servers):
            is_here = server.host_id == self._fabric.me.host_id
            if is_here and not self._fabric.is_linked(server.rank):
                threading.Thread(target=self._link, args=(server,), daemon=True).start()

    def _link(self, server: Member) -> None:
        with contextlib.suppress(errors.PacelineError):  # gone again, as the next membership says
            self._fabric.link(server)

    def on_broken(self, line: Wire, error: errors.PeerError) -> None:
        """Note that a line is of no use any more."""
        if line is self.line and self._used is not None:  # else it has been replaced meanwhile
            self._note(self._used, error)
            self.drop()

    def drop(self) -> None:
        """Give up the line; whoever waits for something on it gets GenerationChanged."""
        if self.line is not None:
            self.line.close()
        self.line = self._used = None

    def look_for_help(self) -> None:
        """Tell the coordinator of a server that it does not miss; PeerTimeout: it is gone too."""
        now_s = time.monotonic()
        waited_s = now_s - self._broke_s
        if self._broken is None or self.why is None or waited_s < _ACCUSE_S:
            return
        if now_s - self._accused_s >= _ACCUSE_S:
            # Over and over: the coordinator forgets it with every generation that this worker
            # adopts, and when it is restarted.
            self._accused_s = now_s
            self._news.accuse(self._broken.server, str(self.why)[:300])
        if waited_s > _CUT_OFF_S and not self._news.is_attached:
            raise errors.PeerTimeout(
                f"rank {self._fabric.rank}: neither the server of partition {self._partition} nor"
                f" the coordinator can be reached for {waited_s:.0f} s: this side of the network"
                " stops, so that only one goes on; see whether this host still has its network"
            ) from self.why

    def loss(self) -> errors.ServerLost:
        """Say that nobody answers any more."""
        over = self._news.over
        what = f"the job is over: {over}" if over else "no server holds it any more"
        last = f" (the last one: {self.why})" if self.why is not None else ""
        return errors.ServerLost(
            f"rank {self._fabric.rank}: partition {self._partition} of the servers' tables is lost:"
            f" {what}{last}",
            rank=self._broken.server if self._broken is not None else None,
        )

    def _note(self, post: Post, error: errors.PacelineError) -> None:
        self._broken, self._broke_s = post, time.monotonic()
        if not isinstance(error, errors.PeerError):
            error = errors.PeerLost(str(error), rank=post.server)
        self.why = error

    def _end_old(self, newest: Membership) -> None:
        line, old = self.line, self._broken.server if self._broken is not None else None
        if line is not None:
            old = line.member.rank
        self.drop()
        # Whoever left in good order may still be about to end.
        presence = self._fabric.presence.get(-1 if old is None else old)
        is_lost = presence is not None and presence.state == "lost"
        if old is not None and old not in newest.ranks and is_lost:
            self._fabric.engine.end_peer(old)
